"""The status of a cluster as a page shows it."""

from shoal.cluster.protocol.status import (
    ArcStatus,
    FitModelStatus,
    FitStatus,
    JobStatus,
    ServerStatus,
    StatusReply,
    StreamStatus,
    WorkerStatus,
)

STATUS = StatusReply(
    "8c1d6f0e21b7a945", 0, 100.0, 2.0, 10.0, 3, 16, 2, "", ("w",), JobStatus(1, "ASP()", 1, ()),
    (
        ServerStatus(0, "process 1 on a", "10.0.0.1", (), True, 0.5),
        ServerStatus(1, "process 2 on b", "10.0.0.2", (), False, 4.0),
    ),
    (WorkerStatus(0, "process 3 on a", "10.0.0.1", 1, 70, True, 0.1), WorkerStatus(None, "x", "h", 0, 0, True, 0.1)),
    (), 1, (),
    (ArcStatus(0, 8, 0, "tcp://a:1", 3, (1,), 50, 500, 70), ArcStatus(8, 16, 1, "tcp://b:1", 3, (), 1, 10, 0)),
    (StreamStatus("tcp://b:1", "tcp://a:1", 0, 0, 0, ((8, 16),), 5, 10),),
    fits=(
        FitStatus("ads", 1, 1, "running", 2, 5, 1000, 1, (FitModelStatus(64, 3, 0.3, 0.85, None),)),
        FitStatus("topics", 9, 1, "stopped", 1, 5, 0, 2, (FitModelStatus(7, 0, 1.2, None, 0.5),) * 2),
    ),
)  # fmt: skip
