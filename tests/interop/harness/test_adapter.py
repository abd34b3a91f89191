"""The harness on a model, and on its export in the harness's own backend for transformers."""

import types

import numpy as np
import pytest

from sparse_lm.config import Config
from sparse_lm.export import export
from sparse_lm.interop.harness.text_model import HarnessError
from tests.interop.harness.examples import text, write_choice_task, write_task
from tests.interop.models import MODELS, save_run

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -r requirements-test.txt")
pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -r requirements-test.txt")
pytest.importorskip("accelerate", reason="needs accelerate: pip install -r requirements-test.txt")

from lm_eval.evaluator import evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from sparse_lm.evaluate import text_model  # noqa: E402
from sparse_lm.interop.harness.adapter import HarnessModel  # noqa: E402
from sparse_lm.interop.harness.tasks import load_tasks  # noqa: E402

SEQ_LEN = 32
TASKS = ["choice", "last_word", "documents", "sentence", "line"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    config = Config(seq_len=SEQ_LEN, model=MODELS["grouped"])
    return save_run(tmp_path_factory.mktemp("run"), config, {7: 4.0})


@pytest.fixture(scope="module")
def ours(workdir):
    return HarnessModel(text_model(workdir, "latest", 200)[0])


@pytest.fixture(scope="module")
def reports(workdir, ours, tmp_path_factory):
    """What the harness reports of transformers' model and of ours, with every answer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other on so small a model
    exported, tasks = tmp_path_factory.mktemp("exported"), tmp_path_factory.mktemp("tasks")
    export(workdir, exported)
    theirs = HFLM(str(exported), device="cpu", dtype="float32", batch_size=3)
    write_tasks(tasks, theirs)
    yield tuple(evaluate(model, load_tasks(TASKS, tasks), bootstrap_iters=0) for model in (theirs, ours))
    torch.set_num_threads(threads)


def write_tasks(directory, theirs):
    """Of each kind, with requests that are shorter and longer than the context."""
    rng = np.random.default_rng(1)
    write_choice_task(directory)
    answers = [{"text": text(rng, 1, 60), "gold": text(rng, 1, 8)} for _ in range(8)]
    questions = ["def 0" * times for times in range(1, 8)]
    answers += [{"text": question, "gold": most_probable(theirs, question)} for question in questions]
    answers += [{"text": "", "gold": "main"}]
    options = dict(output_type="loglikelihood", target_delimiter="")
    write_task(directory, "last_word", answers, ["perplexity", "acc"], **options)
    documents = [{"text": text(rng, *words)} for words in [(1, 4), (8, 14), (16, 24), (40, 60)] for _ in range(2)]
    options = dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
    write_task(directory, "documents", documents, ["word_perplexity", "bits_per_byte"], **options)
    for name, until, new in [("sentence", ["ll", "W("], 24), ("line", ["\n", "ll"], 17)]:
        options = dict(output_type="generate_until", generation_kwargs={"until": until, "max_gen_toks": new})
        prompts = [{"text": text(rng, 1, 60), "gold": "0"} for _ in range(6)]
        write_task(directory, name, prompts, ["exact_match"], **options)


def most_probable(theirs, context):
    with torch.no_grad():
        logits = theirs.model(torch.tensor([theirs.tok_encode(context)[-SEQ_LEN:]])).logits
    return theirs.tok_decode([int(logits[0, -1].argmax())])


def answers(report, task):
    return [[answer for (answer,) in sample["resps"]] for sample in report["samples"][task]]


def test_answers_are_those_of_the_harness_own_backend(reports):
    """Log-likelihoods, with which answers are the most probable ones, and texts, some of which end early."""
    for task in TASKS[:3]:
        theirs, ours = (answers(report, task) for report in reports)
        np.testing.assert_allclose(np.array(ours, float), np.array(theirs, float), rtol=1e-5, atol=1e-4)
    greedy = [answer for [(_, answer)] in answers(reports[1], "last_word")]
    assert 2 <= sum(greedy) < len(greedy)
    for task in TASKS[3:]:
        theirs, ours = (answers(report, task) for report in reports)
        assert ours == theirs
        lengths = [len(text.encode()) for [text] in ours]
        assert min(lengths) < 16 <= max(lengths), ours


def request(*args):
    return types.SimpleNamespace(args=args, task_name="quiz")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_gen_toks": SEQ_LEN}, "quiz: max_gen_toks = 32 must be 1 to 31, the model takes 32 tokens"),
        ({"max_gen_toks": 4, "top_k": 5}, "quiz: generation_kwargs has top_k; allowed are .*top_p"),
    ],
)
def test_generation_that_is_not_possible_is_refused(ours, kwargs, message):
    with pytest.raises(HarnessError, match=message):
        ours.generate_until([request("x", {"until": ["."], **kwargs})])


@pytest.mark.parametrize("continuation", ["", "0" * (SEQ_LEN + 1)])
def test_continuations_that_cannot_be_scored_are_refused(ours, continuation):
    with pytest.raises(HarnessError, match=rf"has {len(continuation)} tokens, must be 1 to 32"):
        ours.loglikelihood([request("x", continuation)])
