"""The commands of docs/data.md, on small files in the places that they name."""

import re
import runpy
import shlex
from pathlib import Path

import pyarrow.parquet
import pytest

from sparse_lm.config import parse
from sparse_lm.data import open_data
from sparse_lm.data.dataset import open_prepared
from tests.command_lines import ROOT, run_each
from tests.data.examples import make_documents, make_tokenizer, write_c4, write_dclm, write_tfds
from tests.data.test_published_corpora import C4_FEATURES

COMMANDS = re.findall(r"^python -m sparse_lm\.(\w+) (.*)$", (ROOT / "docs/data.md").read_text(), re.MULTILINE)
DOCUMENTS, VALIDATION = make_documents(400), make_documents(9, seed=1)


def size(documents):
    return sum(len(text.encode()) for text in documents)


def write_everything(folder: Path) -> None:
    shard = folder / "dclm/global-shard_03_of_10/local-shard_1_of_10/shard_00000000_processed.jsonl.zst"
    parquet = folder / "fineweb/data/CC-MAIN-2024-10/000_00000.parquet"
    for path in (shard, parquet, folder / "corpus/deep/a.txt", folder / "c4/en/x", folder / "llama3/x"):
        path.parent.mkdir(parents=True)
    (folder / "corpus/deep/a.txt").write_text("".join(DOCUMENTS))
    write_c4(folder / "c4/en/c4-train.00000-of-01024.json.gz", DOCUMENTS)
    write_c4(folder / "c4/en/c4-validation.00000-of-00008.json.gz", VALIDATION)
    make_tokenizer().save(str(folder / "llama3/tokenizer.json"))
    write_dclm(shard, DOCUMENTS)
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS, "id": ["x"] * 400}), parquet)
    rows = [dict.fromkeys(C4_FEATURES, "x") | {"text": text} for text in DOCUMENTS]
    made = write_tfds(folder / "made", C4_FEATURES, train=rows[:350], validation=rows[350:])
    (folder / "tensorflow_datasets/c4/en").mkdir(parents=True)
    made.rename(folder / "tensorflow_datasets/c4/en/3.1.0")


@pytest.mark.long
def test_commands_do_what_the_page_says(tmp_path, tmp_path_factory, monkeypatch):
    write_everything(tmp_path)
    prepared = [shlex.split(arguments) for name, arguments in COMMANDS if name == "prepare_data"]
    assert len(prepared) >= 5
    results = run_each("sparse_lm.prepare_data", prepared, tmp_path_factory.mktemp("outputs"), cwd=tmp_path)
    for arguments, result in zip(prepared, results, strict=True):
        assert result.returncode == 0, result.stderr
        (output,) = (flag.removeprefix("--output=") for flag in arguments if flag.startswith("--output="))
        assert result.stdout.startswith(str(Path(output)))
        splits = open_prepared(tmp_path / output).info["splits"].values()
        assert sum(split["bytes"] for split in splits) in {size(DOCUMENTS), size(DOCUMENTS + VALIDATION)}
    monkeypatch.chdir(tmp_path)
    for name, arguments in COMMANDS:
        if name != "prepare_data":
            assert name == "train"
            flags = dict(flag[2:].split("=", 1) for flag in shlex.split(arguments))
            config = runpy.run_path(str(ROOT / flags.pop("config")))["get_config"]()
            changes = {key.removeprefix("config."): value for key, value in flags.items() if key != "workdir"}
            assert changes.keys() <= {"data.path", "model.document_separator"}
            changes |= {key: int(value) for key, value in changes.items() if key == "model.document_separator"}
            config.update_from_flattened_dict(changes)
            data = open_data(parse(config))
            assert len(data.train) and len(data.heldout)
