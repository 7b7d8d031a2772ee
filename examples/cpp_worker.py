"""A worker in C++: this script joins a cluster for it, and cpp_worker.cc pushes and pulls rows without Python.

    python examples/cpp_worker.py ./cpp_worker                                        # one worker, two servers
    shoal launch --servers 2 --workers 2 examples/cpp_worker.py ./cpp_worker          # several

The top of cpp_worker.cc has the command that compiles it. Servers know a worker by its numbers, so only one of the two
programs may push: this one makes the table, stays a member of the cluster, and passes on each newer map.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import shoal
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.cluster.worker.remote_shard import RemoteShard


def find_libzmq() -> str:
    """Return the path of the libzmq that pyzmq has loaded."""
    loaded = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    return next(path for path in loaded if "libzmq" in Path(path).name)


def line_of(map: ClusterMap) -> str:
    """Return a map as cpp_worker.cc reads it."""
    places = {endpoint.id: place for place, endpoint in enumerate(map.endpoints)}
    backups = [places[stream.backup] for stream in map.streams]
    words: list[object] = [map.epoch, len(map.endpoints)]
    words += (word for endpoint in map.endpoints for word in (endpoint.address, endpoint.server))
    words += [len(map.arcs)]
    words += (word for arc in map.arcs for word in (arc.first_slot, arc.end_slot, places[arc.primary]))
    return " ".join(str(word) for word in [*words, len(backups), *backups])


def run(store: ClusterStore, table: int, program: str) -> int:
    """Run the program until it ends; return its exit status."""
    numbers = (*store.channel.worker, store.clock, table, store.num_workers)
    with subprocess.Popen([program, find_libzmq(), *map(str, numbers)], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            while process.poll() is None:
                print(line_of(store.channel.map), file=process.stdin, flush=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
        return process.wait()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM", help="cpp_worker.cc, compiled")
    parser.add_argument("--cluster", metavar="ADDRESS", default=os.environ.get("SHOAL_SCHEDULER"), help="the scheduler")
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="to start without a cluster (default: 2)")
    arguments = parser.parse_args()
    connection = shoal.connect(arguments.cluster) if arguments.cluster else shoal.launch(servers=arguments.servers)
    with connection as store:
        table = store.table("rows", dim=4, optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        assert isinstance(table.shard, RemoteShard)  # which has the number of the table
        status = run(store, table.shard.number, arguments.program)
        store.barrier()  # until the programs of all workers have ended
    sys.exit(status)


if __name__ == "__main__":
    main()
