"""The times of steps, and how long a run still takes."""

from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.telemetry.summary import RunSummary
from tests import small
from tests.clock import Clock

CONFIG = small.config("sste", log_every=2)  # 12 steps, sparse on 4..8
METRICS = {"loss": 2.0, "grad_norm": 1.0, "skipped": 0, "skipped_in_a_row": 0}
RESULTS = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 1.0}


def test_steps_are_timed_by_phase_without_what_lies_between_them(tmp_path, capsys):
    """The first step of a phase, which takes 50 s more, has no time; an evaluation of 1000 s is no step's."""
    clock = Clock()
    with RunSummary(tmp_path, CONFIG, clock) as summary, StepLog(CONFIG, str(tmp_path), summary, 0) as log:
        for step in range(CONFIG.steps):
            phase = CONFIG.phase(step)
            clock.now += step + (50 if phase != CONFIG.phase(step - 1) or step == 0 else 0)
            assert log.settle(step, METRICS) == 0
            if step == 8:
                clock.now += 1000
                summary.spent_on("evaluation")
            log.write(step, METRICS, RESULTS if step == 11 else None)
    times = {line["step"]: line["step_time"] for line in read_metrics(tmp_path)}
    assert times == {0: None, 2: 1.5, 4: None, 6: 5.5, 8: None, 10: 9.5, 11: 11}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("left")]
    left = [line.rsplit(" | ", 1)[1] for line in lines]
    # Steps that are left as long as the last ones of their phase; the first line has none yet.
    seconds = [1 * 1.5 + 4 * 1.5 + 4 * 1.5, 3 * 1.5 + 4 * 1.5, 1 * 5.5 + 4 * 1.5, 3 * 1.5, 9.5, 0]
    assert left == ["- left", *(f"{round(s)} s left" for s in seconds)]
    assert lines[1] == f"step 3/12 | dense | loss 2.0000 | {CONFIG.tokens_per_step / 1.5:,.0f} tokens/s | {left[1]}"
