import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from sparse_lm.data.errors import DataError
from sparse_lm.data.tasks import Workers


@dataclasses.dataclass(frozen=True)
class Square:
    path: Path
    number: int

    def run(self, report):
        if self.number < 0:
            raise DataError(f"{self.number} is negative")
        if self.number > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        report({"numbers": 1})
        return {"square": self.number**2, "process": os.getpid(), "threads": os.environ.get("RAYON_NUM_THREADS")}


def tasks_in(folder: Path, numbers) -> list[Square]:
    return [Square(folder / f"{number}.json", number) for number in numbers]


def test_several_processes_give_results_in_order_and_say_what_goes_wrong(tmp_path):
    reports = []
    with Workers(2, threads=3) as workers:
        results = workers.run(tasks_in(tmp_path, range(9)), reports.append)
        assert [result["square"] for result in results] == [number**2 for number in range(9)]
        assert {result["process"] for result in results} & {os.getpid()} == set()
        assert {result["threads"] for result in results} == {"3"}
        assert reports == [{"numbers": 1}] * 9
        with pytest.raises(DataError, match="-1 is negative") as raised:
            workers.run(tasks_in(tmp_path, [10, -1]), reports.append)
        assert "in run" in raised.value.__notes__[0]
    assert not (tmp_path / "-1.json").exists()
    with Workers(2) as workers, pytest.raises(DataError, match=r"a process ended with exit code -9.*--processes"):
        workers.run(tasks_in(tmp_path, [101, 102]), reports.append)


def test_results_on_disk_are_not_worked_out_again(tmp_path):
    (tmp_path / "3.json").write_text('{"square": "known"}')
    reports = []
    results = Workers(1).run(tasks_in(tmp_path, [2, 3, 4]), reports.append)
    assert [result["square"] for result in results] == [4, "known", 16]
    assert reports == [{"saved": {"square": "known"}}, {"numbers": 1}, {"numbers": 1}]
    assert json.loads((tmp_path / "4.json").read_text())["square"] == 16
