"""The entry point, on a workdir made by hand."""

import pytest

from sparse_lm import generate
from sparse_lm.config import Config, ModelConfig, SparsityConfig
from sparse_lm.data.tokenizer import end_of_text, load_tokenizer
from sparse_lm.model import decode, llama
from sparse_lm.recipes import Act24
from sparse_lm.training.checkpoints.checkpoint import restore_params
from tests.command_lines import assert_refused, run_each
from tests.interop.models import save_run

OPTIONS = dict(max_new_tokens=12, temperature=1.0, top_p=0.9)
MODEL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, vocab_size=280, dtype="float32")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), Config(model=MODEL, seq_len=32), {3: 4.0, 5: 5.0})


def test_continues_the_prompt_reproducibly(workdir):
    of_seeds = [generate.continue_texts(workdir, ["def main("], seed=seed, **OPTIONS) for seed in (0, 0, 1)]
    [first], [again], [other] = of_seeds
    assert first == again
    assert first != other
    assert generate.continue_texts(workdir, ["def main(", "def main("], seed=0, **OPTIONS) == [first, other]
    assert generate.continue_texts(workdir, [], **OPTIONS) == []
    assert first.startswith("def main(")
    assert len(first) > len("def main(")
    [spelled] = generate.continue_texts(workdir, ["a<|endoftext|>b"], max_new_tokens=1)
    assert spelled.startswith("a<|endoftext|>b")  # text like any other, as in a corpus


def test_documents_begin_and_end_with_the_end_of_text_and_a_model_that_stays_sparse_makes_them_sparsely(tmp_path):
    sparsity = SparsityConfig(recipe=Act24(), end_step=200, leave=False, dense_layers=1)
    workdir = save_run(tmp_path, Config(model=MODEL, steps=200, seq_len=32, sparsity=sparsity), {5: 4.0})
    tokenizer, (params, *_) = load_tokenizer(workdir / "tokenizer.json"), restore_params(workdir)
    end = end_of_text(tokenizer)
    [made] = decode.generate(llama.graphdef(MODEL), params, [[end]], max_new_tokens=260, recipe=Act24(), dense_layers=1)
    assert generate.continue_texts(workdir, [""], max_new_tokens=260) == [tokenizer.decode(made[: made.index(end)])]


@pytest.mark.long
def test_command_line_and_mistakes_in_it(workdir, tmp_path):
    mistakes = {
        "--temperature=-1": "flag --temperature=-1.0: must be 0 or more",
        "--temperature=nan": "flag --temperature=nan: must be 0 or more",
        "--max_new_tokens=-1": "flag --max_new_tokens=-1: -1 is not an integer in the range [0, 1073741824]",
        "--prompt=caf\udce9": "must be UTF-8",
        "--top_p=0": "flag --top_p=0.0: must be in (0, 1]",
    }
    flags = [f"--workdir={workdir}", "--prompt=def main(", *(f"--{name}={value}" for name, value in OPTIONS.items())]
    both = [*flags, "--prompt=class ", "--seed=3000000000", "--checkpoint=best"]
    good, *bad = run_each("sparse_lm.generate", [both, *([*flags, flag] for flag in mistakes)], tmp_path)
    options = dict(checkpoint="best", seed=3_000_000_000, **OPTIONS)
    expected = generate.continue_texts(workdir, ["def main(", "class "], **options)
    assert good.returncode == 0, good.stderr
    assert good.stdout == "\n".join(expected) + "\n"
    for message, run in zip(mistakes.values(), bad, strict=True):
        assert_refused(run, message)
