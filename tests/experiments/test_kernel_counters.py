from experiments.kernels.counters import tabulate
from experiments.kernels.nsight_compute import METRICS, read_report

NANOSECONDS, TENSOR = METRICS["nanoseconds"], METRICS["tensor_pipe_percent"]


def report(*launches):
    """What `ncu --csv --page raw` prints: messages, names, units, a line for each launch."""
    header = f'"ID","Kernel Name","Block Size","{NANOSECONDS}","{TENSOR}"'
    lines = [f'"{i}","{name}","(384, 1, 1)","{ns}","{tensor}"' for i, (name, ns, tensor) in enumerate(launches)]
    return "\n".join(["==PROF== Connected to process 7", "", header, '"","","","ns","%"', *lines, ""])


def test_numbers_of_each_launch():
    text = report(("product<int, 2>", "1,317,696", "93.27"), ("other", "938,368", ""), ("third", "1", "(!) n/a"))
    assert read_report(text) == [
        {"kernel": "product<int, 2>", "nanoseconds": 1317696.0, "tensor_pipe_percent": 93.27},
        {"kernel": "other", "nanoseconds": 938368.0},
        {"kernel": "third", "nanoseconds": 1.0},
    ]


def test_medians_of_each_product():
    labels = [dict(product="a", m=1)] * 3 + [dict(product="a", m=2)] * 3
    profiles = [dict(kernel="k", nanoseconds=ns) for ns in (3.0, 1.0, 2.0, 7.0, 9.0, 8.0)]
    assert tabulate(labels, profiles) == [
        dict(product="a", m=1, kernel="k", launches=3, nanoseconds=2.0),
        dict(product="a", m=2, kernel="k", launches=3, nanoseconds=8.0),
    ]
