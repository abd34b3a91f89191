"""Collectives of compiled programs are read with the bytes of their results and how often they run."""

from experiments.bench.hlo_collectives import collectives

PROGRAM = """\
HloModule step

%layer (p: (s32[])) -> (s32[]) {
  %gather = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %several = ((bf16[4], f32[2]), (bf16[16], f32[8])) all-gather-start(%a, %b), replica_groups=[1,4]<=[4], dimensions={0}
  %scatter = ((bf16[16]), bf16[4]) reduce-scatter-start(%c), replica_groups=[1,4]<=[4], dimensions={0}
}

%microbatch (p: (s32[])) -> (s32[]) {
  %layers = (s32[]) while(%t), condition=%c1, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %sum = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %steps = (s32[]) while(%t), condition=%c2, body=%microbatch, backend_config={"known_trip_count":{"n":"2"}}
  %last = pred[8]{0} all-gather(%d), replica_groups=[1,4]<=[4], dimensions={0}
}
"""


def test_bytes_are_of_results_and_loops_in_loops_take_all_their_turns():
    assert [(c.kind, c.bytes, c.times) for c in collectives(PROGRAM)] == [
        ("all-gather", 16 * 8 * 2, 6),
        ("all-gather", 16 * 2 + 8 * 4, 6),
        ("reduce-scatter", 4 * 2, 6),
        ("all-reduce", 6 * 4, 2),
        ("all-gather", 8, 1),
    ]
