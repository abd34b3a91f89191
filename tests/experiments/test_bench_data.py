"""The data benchmark measures every preparation from its start."""

from experiments.bench import data


def test_one_core_prepares_once(monkeypatch):
    """A second preparation from the same files would only find what the first one left."""
    prepared = []
    monkeypatch.setattr(data, "python_library", lambda: ["one text", "and another"])
    monkeypatch.setattr(data, "SEQ_LENS", ())
    monkeypatch.setattr(data, "prepare_in", lambda directory, *_: prepared.append(directory.name))
    rates = data.measure(1)["tokens_per_second"]
    assert prepared == ["by_1"] and rates["preparing"].keys() == {1}
    data.measure(2)
    assert prepared == ["by_1", "by_1", "by_2"]
