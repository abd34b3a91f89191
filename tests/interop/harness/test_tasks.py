"""Tasks by name."""

from pathlib import Path

import pytest
import yaml

from sparse_lm.interop.harness.text_model import HarnessError
from tests.interop.harness.examples import write_choice_task

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -r requirements-test.txt")

from sparse_lm.interop.harness import tasks  # noqa: E402

FOLDERS = ["arc", "hellaswag", "lambada", "openbookqa", "piqa", "race", "sciq", "super_glue"]


class FewTasks(tasks.TaskManager):
    """Instead of all the harness's tasks, which take ten seconds to look through, those of some folders."""

    def __init__(self, include_path, include_defaults=True):
        folders = [Path(lm_eval.__file__).parent / "tasks" / folder for folder in FOLDERS] if include_defaults else []
        super().__init__(include_path=[*folders, *filter(None, [include_path])], include_defaults=False)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    monkeypatch.setattr(tasks, "TaskManager", FewTasks)


def test_the_paper_group_is_tasks_that_the_harness_has(monkeypatch):
    monkeypatch.setattr(FewTasks, "load", lambda self, names: names)  # their data would be downloaded
    assert set(tasks.GROUPS["paper"]) <= set(FewTasks(None).all_subtasks)
    assert tasks.load_tasks(["paper"], None) == sorted(tasks.GROUPS["paper"])
    assert tasks.load_tasks(["lambada_open*", "sciq"], None) == ["lambada_openai", "sciq"]


def test_tasks_of_ones_own_and_unknown_ones(tmp_path):
    write_choice_task(tmp_path, "mine")
    assert set(tasks.load_tasks(["mine"], tmp_path)["tasks"]) == {"mine"}
    with pytest.raises(HarnessError, match=r"^--tasks=yours: lm-eval 0\.4\.\d+ has no such task"):
        tasks.load_tasks(["mine", "yours"], tmp_path)
    with pytest.raises(HarnessError, match=r"^--include_path=.*/no: must be a directory"):
        tasks.load_tasks(["mine"], tmp_path / "no")


def test_mistakes_in_a_task_file_are_one_line(tmp_path):
    mistakes = {
        "Got invalid output_type 'multiple_choise', must be in .*": {"output_type": "multiple_choise"},
        "Unable to find '/nowhere.jsonl'": {"dataset_kwargs": {"data_files": {"test": "/nowhere.jsonl"}}},
        "UndefinedError: 'qq' is undefined": {"doc_to_text": "{{qq}}"},
        "KeyError: 'tset'": {"test_split": "tset"},
    }
    write_choice_task(tmp_path, "mined")
    file = tmp_path / "mined.yaml"
    task = yaml.safe_load(file.read_text())
    for reason, change in mistakes.items():
        file.write_text(yaml.safe_dump(task | change))
        with pytest.raises(HarnessError, match=f"^--tasks=mined: {reason}$"):
            tasks.load_tasks(["mined"], tmp_path)
