import dataclasses
import types

import numpy as np

from sparse_lm.training.step import make_trainer
from sparse_lm.training.telemetry.overview import print_overview
from tests import small


def test_says_what_the_run_is_and_warns_of_data_that_is_read_more_than_once(capsys, caplog):
    config = small.config("dense", seq_len=33)
    trainer = make_trainer(config)
    state = dataclasses.replace(trainer.abstract_state(), step=np.int32(0))
    parameters = 2 * 320 * 32 + 2 * (2 * 32 + 32 * 32 + 2 * 16 * 32 + 32 * 32 + 2 * 128 * 32) + 32
    for windows, epochs in ((480, "0.1"), (12, "4")):
        caplog.clear()
        data = types.SimpleNamespace(directory="here", train=range(windows), shares=(), describe=lambda: "a corpus")
        print_overview(config, "runs/small", trainer, data, state)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "runs/small: starting"
        facts = dict(line.strip().split("  ", 1) for line in lines[1:])
        assert facts["parameters"].strip() == f"{parameters:,}"
        assert facts["data"].strip() == "a corpus"
        assert facts["tokens"].strip() == f"132 a step, 1,584 in all, {epochs} epochs"
        assert facts["attention"].strip() == "XLA"
        assert facts["phases"].strip() == "dense 0..11"
        assert ("every training window of here is read 4.0 times" in caplog.text) == (windows == 12)


def test_says_how_many_parameters_of_a_mixture_a_token_meets(capsys):
    config = small.config("experts24")
    trainer = make_trainer(config)
    data = types.SimpleNamespace(directory="here", train=range(480), shares=(), describe=lambda: "a corpus")
    state = dataclasses.replace(trainer.abstract_state(), step=np.int32(0))
    print_overview(config, "runs/small", trainer, data, state)
    of_attention, expert = 32 * 32 + 2 * 16 * 32 + 32 * 32, 2 * 64 * 32
    outside = 2 * 320 * 32 + 32 + 2 * (2 * 32 + of_attention + 4 * 32 + 4 + 2 * 32 * 32)
    total, met = (f"{outside + 2 * experts * expert:,}" for experts in (4, 2))
    assert f"parameters  {total}, of which a token meets {met}\n" in capsys.readouterr().out
