"""Attack every port of a cluster on this machine, and check that it continues to serve.

    python tests/support/attack.py tcp://127.0.0.1:5570 --seconds 60
    python tests/support/attack.py tcp://127.0.0.1:5570 --seconds 60 --curve keys  # with keys: also as one who has them

It acts alternately as a process outside the cluster and as a member: sends HTTP, TLS and other protocols, random bytes,
every greeting of ZeroMQ followed by random bytes, announces huge frames, holds hundreds of silent connections, sends
byte by byte, and sends control and data messages that are changed, repeated, out of order or out of bounds. It connects
to the loopback interface only, and requests no file. At the end it prints the number of attacks of each kind;
``store.scheduler_metrics()`` and ``store.server_metrics()`` have the numbers of refusals.

Threads: an Attack may be run by several, each with a seed of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from shoal import _core
from shoal.cluster.protocol import messages as m
from shoal.cluster.protocol.address import is_loopback, split
from shoal.cluster.protocol.curve import Keys
from shoal.table.spec import TableRecord

PATIENCE = 2.0  # seconds for a target to answer
HELD = 300  # silent connections

BROWSER = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101\r\n"
    b"Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\nAccept-Language: en-US,en;q=0.5\r\n"
    b"Accept-Encoding: gzip, deflate, br\r\nConnection: keep-alive\r\nUpgrade-Insecure-Requests: 1\r\n\r\n"
)
TLS = bytes.fromhex("160301020001000001fc0303") + bytes(range(256)) + bytes(246)
LINES = (BROWSER, TLS, b"SSH-2.0-OpenSSH_9.2\r\n", b"*1\r\n$4\r\nPING\r\n", b"EHLO x\r\n", b"\0" * 64, b"\n" * 64)
OPS = tuple(op for op in _core.Op if not op.name.startswith("SAVE"))  # those would write and read files


def greeting(mechanism: bytes, version: tuple[int, int] = (3, 1)) -> bytes:
    """The first 64 bytes of ZeroMQ's protocol 3."""
    return b"\xff" + bytes(8) + b"\x7f" + bytes(version) + mechanism.ljust(20, b"\0") + bytes(32)


def ready(kind: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    """The command that ends the handshake without keys."""
    fields = b"".join(
        struct.pack(">B", len(name)) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", identity))
    )
    return b"\x04" + struct.pack(">B", 6 + len(fields)) + b"\x05READY" + fields


class Attack:
    """Random attacks on a cluster, by a process outside it or by a member.

    Parameters
    ----------
    scheduler : str
        Its address.
    endpoints : list of str
        Addresses of data ports.
    keys : Keys, optional
        Of the cluster.
    let_in : bool
        Whether to use them; otherwise connect without keys, or with others.
    form : TableRecord, optional
        A table's description to begin from.
    insider : bytes, optional
        Sender of a worker of the running job, for requests in its name.
    seed : int
    """

    def __init__(
        self,
        scheduler: str,
        endpoints: list[str],
        *,
        keys: Keys | None = None,
        let_in: bool = True,
        form: TableRecord | None = None,
        insider: bytes = b"",
        seed: int = 0,
    ) -> None:
        for address in (scheduler, *endpoints):
            if not is_loopback(split(address)[0]):
                raise ValueError(f"{address} is not on the loopback interface: this attacks nothing else")
        self.scheduler = scheduler
        self.endpoints = endpoints
        self.keys = keys
        self.let_in = let_in
        self.form = form
        self.insider = insider
        self.rng = random.Random(seed)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.done: Counter[str] = Counter()
        self.recorded: list[list[bytes]] = []

    def close(self) -> None:
        self.context.destroy(0)

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Attack for so long."""
        end = time.monotonic() + seconds
        kinds = (
            self.another_protocol,
            self.random_bytes,
            self.old_greeting,
            self.greeting_and_rubbish,
            self.huge_frame,
            self.endless_parts,
            self.byte_by_byte,
            self.garbage_messages,
            self.changed_requests,
            self.a_member_s_requests,
            self.data_messages,
        )
        while time.monotonic() < end and not stop():
            kind = self.rng.choice(kinds)
            with contextlib.suppress(OSError, zmq.ZMQError):
                kind()
            self.done[kind.__name__] += 1

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def target(self) -> tuple[str, int]:
        return split(self.rng.choice([self.scheduler, *self.endpoints]))

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.target(), PATIENCE) as sock:
            sock.settimeout(PATIENCE)
            yield sock
            if self.rng.random() < 0.3:  # a reset instead of an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def another_protocol(self) -> None:
        with self.connected() as sock:
            sock.sendall(self.rng.choice(LINES))
            self.wait_a_little(sock)

    def wait_a_little(self, sock: socket.socket) -> None:
        if self.rng.random() < 0.5:
            sock.settimeout(0.05)
            with contextlib.suppress(OSError):
                sock.recv(4096)

    def random_bytes(self) -> None:
        with self.connected() as sock:
            first = self.rng.choice([b"", b"\x01", b"\xff", b"\xff" + bytes(8) + b"\x7f"])
            sock.sendall(first + self.rng.randbytes(self.rng.choice([1, 5, 64, 1000, 70_000])))
            self.wait_a_little(sock)

    def old_greeting(self) -> None:
        with self.connected() as sock:
            if self.rng.random() < 0.5:  # 1.0: an identity, then frames
                sock.sendall(bytes.fromhex("0100020041") * self.rng.choice([1, 20]) + self.rng.randbytes(9))
            else:
                kind = struct.pack(">B", self.rng.randrange(12))
                sock.sendall(b"\xff" + bytes(8) + b"\x7f\x01" + kind + b"\x00\x00" + b"\x00\x01A" * 20)
                sock.sendall(b"\x00" + struct.pack(">B", 200) + self.rng.randbytes(200))
            self.wait_a_little(sock)

    def greeting_and_rubbish(self) -> None:
        mechanism = self.rng.choice([b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20, b""])
        commands = [
            ready(),
            ready(b"ROUTER", self.rng.randbytes(self.rng.randrange(200))),
            ready(b"POEM"),
            b"\x04\x05\x05READY"[: self.rng.randrange(8)],
            b"\x04\x0c\x05READY\x01A\xff\xff\xff\xff",  # a value longer than the command
            b"\x04\x10\x05HELLO\x04user\x04word",
            b"\x04\xc8\x05HELLO" + self.rng.randbytes(194),
            b"\x06" + struct.pack(">Q", 1 << 20) + b"\x05READY" + bytes(1 << 12),
            b"\x04\x07\x04PING\x00\x00",
            b"\x04\x00",
            self.rng.randbytes(100),
        ]
        with self.connected() as sock:
            sock.sendall(greeting(mechanism, self.rng.choice([(3, 0), (3, 1), (3, 255), (255, 255)])))
            for _ in range(self.rng.randrange(4)):
                sock.sendall(self.rng.choice(commands))
            self.wait_a_little(sock)

    def huge_frame(self) -> None:
        with self.connected() as sock:
            size = self.rng.choice([(1 << 63) - 1, (1 << 64) - 1, 1 << 40, 1 << 31, 1 << 26, 1 << 24])
            flag = self.rng.choice([b"\x02", b"\x03", b"\x06"])
            sock.sendall(greeting(b"NULL") + ready() + flag + struct.pack(">Q", size) + bytes(1000))
            self.wait_a_little(sock)

    def endless_parts(self) -> None:
        with self.connected() as sock:
            sock.sendall(greeting(b"NULL") + ready() + b"\x01\x01x" * 50_000)
            if self.rng.random() < 0.5:
                sock.sendall(b"\x00\x01x")
            self.wait_a_little(sock)

    def byte_by_byte(self) -> None:
        with self.connected() as sock:
            for byte in (greeting(b"NULL") + ready())[: self.rng.randrange(8, 90)]:
                sock.sendall(bytes([byte]))
                time.sleep(0.002)

    @contextlib.contextmanager
    def half_open(self, count: int = HELD) -> Iterator[int]:
        """Hold connections that send nothing, or stop within the greeting."""
        with contextlib.ExitStack() as held:
            opened = 0
            for k in range(count):
                with contextlib.suppress(OSError):
                    sock = held.enter_context(socket.create_connection(self.target(), PATIENCE))
                    sock.sendall(greeting(b"NULL")[: k % 12])
                    opened += 1
            yield opened

    # ---- messages ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def dealer(self, address: str, role: str) -> Iterator[zmq.Socket[bytes]]:
        with self.context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.LINGER, 200)
            sock.setsockopt(zmq.SNDTIMEO, 1000)
            if self.keys is not None and (self.let_in or self.rng.random() < 0.5):
                self.keys.client_of(role)(sock)
                if not self.let_in:
                    public, secret = zmq.curve_keypair()
                    sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
                    sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
            sock.connect(address)
            yield sock

    def garbage_messages(self) -> None:
        role, address = self.rng.choice([("scheduler", self.scheduler), *[("server", one) for one in self.endpoints]])
        preamble = m.encode(m.Heartbeat(b"s", 0))[0]
        with self.dealer(address, role) as sock:
            for _ in range(50):
                frames = [
                    self.rng.randbytes(self.rng.choice([0, 1, 9, 64, 5000])) for _ in range(self.rng.randrange(1, 7))
                ]
                sock.send_multipart([preamble, *frames] if self.rng.random() < 0.5 else frames)

    def bodies(self) -> list[list[object]]:
        """Requests as they are encoded, each with values that are in place, at the edge, or beyond."""
        n = self.rng.choice(
            [0, 1, 2, -1, 5, 1 << 16, 10**8, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)]
        )
        text = self.rng.choice(
            ["", "t", "x" * 5000, "\n\x1b[31m", "ä" * 99, "tcp://127.0.0.1:1", "tcp://" + "h" * 400 + ":7"]
        )
        real = self.rng.choice([0.0, 1.5, -1.0, float("nan"), float("inf")])
        rules = self.rng.choice([["asp", 0, False], ["bsp", 0, True], ["xxx", 0, False], ["ssp", n, False], None, n])
        described = None if self.form is None else {**msgspec.to_builtins(self.form), "name": text or "t"}
        if described is not None and self.rng.random() < 0.9:
            described[self.rng.choice(list(described))] = self.rng.choice([n, text, real, None, {"lr": real}, [n]])
        return [
            ["hello", self.rng.choice(["worker", "server", "launcher", "poet", text]), text],
            [
                "join",
                self.rng.choice([None, n]),
                [text] * self.rng.choice([0, 1, 3]),
                self.rng.choice([None, n]),
                rules,
            ],
            ["ask-map"],
            ["ask-table", described],
            ["ask-tables"],
            ["barrier", text],
            ["take-part", n, n, text, n, real, n],
            ["ask-figures"],
            [text, n],
            [],
        ]

    def say(self, sock: zmq.Socket[bytes], body: object) -> None:
        frames = m.framed(msgspec.msgpack.encode(body))
        if self.rng.random() < 0.2:
            noisy = bytearray(frames[1])
            noisy[self.rng.randrange(len(noisy))] = self.rng.randrange(256)
            frames[1] = bytes(noisy)
        self.recorded = [*self.recorded[-200:], frames]
        sock.send_multipart(frames)

    def changed_requests(self) -> None:
        """Messages of a process outside the cluster."""
        with self.dealer(self.scheduler, "scheduler") as sock:
            for k in range(40):
                sender = self.rng.choice([b"s" * 16, b"", b"s" * 17, self.rng.randbytes(16)])
                number = self.rng.choice([1, k, -1, 0, 1 << 40, (1 << 63) - 1])
                self.say(sock, ["ask", sender, number, self.rng.choice(self.bodies())])
                self.say(sock, ["heartbeat", sender, number])
                self.say(sock, ["done", sender, number, number, "fault", [], None])
            for frames in self.recorded:  # repeat recorded messages
                sock.send_multipart(frames)

    def a_member_s_requests(self) -> None:
        """Messages of an accepted peer with invalid requests."""
        sender = self.insider if self.insider and self.rng.random() < 0.5 else self.rng.randbytes(16)
        begin = self.rng.randrange(2, 1 << 40)
        role = self.rng.choice(["worker", "worker", "server", "launcher"])
        with self.dealer(self.scheduler, "scheduler") as sock:
            sock.send_multipart(m.encode(m.Request(sender, 1, m.Hello(role, "an attacker"))))
            if not sock.poll(1000 * PATIENCE):
                return
            for number in range(begin, begin + 60):
                body = self.rng.choice(self.bodies())
                self.say(sock, ["ask", sender, number, body])
            for number in (1, 2, begin, begin + 30, begin + 59):
                self.say(sock, ["ask", sender, number, ["ask-map"]])
                self.say(sock, ["done", sender, number, number, "it failed", [], None])
            if sender != self.insider:
                sock.send_multipart(m.encode(m.Request(sender, begin + 60, m.Leave())))
            while sock.poll(50):
                sock.recv_multipart()

    def data_messages(self) -> None:
        if not self.endpoints:
            return
        with self.dealer(self.rng.choice(self.endpoints), "server") as sock:
            for _ in range(50):
                hashes = struct.pack("<4Q", *(self.rng.getrandbits(64) for _ in range(4)))
                payload = [hashes, bytes(self.rng.choice([0, 16, 32, 4096]))]
                header = bytearray(
                    _core.encode_header(
                        op=self.rng.choice(OPS),
                        payload=payload,
                        worker=self.rng.choice([0, 1, (1 << 32) - 1]),
                        incarnation=self.rng.randrange(3),
                        job=self.rng.choice([1, self.rng.getrandbits(32)]),
                        epoch=self.rng.choice([0, 1, 1 << 31]),
                        table=self.rng.choice([0, 1, (1 << 32) - 1]),
                        clock=self.rng.choice([0, 1, (1 << 32) - 1]),
                        sequence=self.rng.getrandbits(64),
                        count=self.rng.choice([0, 4, 1 << 20, (1 << 32) - 1]),
                    )
                )
                if self.rng.random() < 0.5:
                    header[self.rng.randrange(len(header))] ^= 1 << self.rng.randrange(8)
                sock.send_multipart([bytes(header), *payload])


def endpoints_of(scheduler: str, keys: Keys | None) -> list[str]:
    """Ask the scheduler for the addresses of the data ports."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.client_of("scheduler")(sock)
        sock.connect(scheduler)
        sender = random.randbytes(16)
        for number, body in enumerate((m.Hello("worker", "an attacker"), m.GetMap(), m.Leave()), 1):
            sock.send_multipart(m.encode(m.Request(sender, number, body)))
            if not sock.poll(10_000):
                raise SystemExit(f"no scheduler answers at {scheduler}")
            reply = m.decode(sock.recv_multipart())
            if isinstance(reply, m.Reply) and isinstance(reply.body, m.GetMapReply):
                return [endpoint.address for endpoint in reply.body.map.endpoints]
    raise SystemExit(f"the cluster at {scheduler} has not all its servers yet")


def attack(
    scheduler: str,
    endpoints: list[str],
    seconds: float,
    *,
    keys: Keys | None = None,
    form: TableRecord | None = None,
    insider: bytes = b"",
    threads: int = 2,
    seed: int = 0,
) -> Counter[str]:
    """Attack with several threads, as a stranger and, with keys, as one who is let in; returns what was done."""
    attacks = [
        Attack(
            scheduler,
            endpoints,
            keys=keys,
            let_in=bool(k % 2),
            form=form,
            insider=insider if k % 2 else b"",
            seed=seed + k,
        )
        for k in range(threads)
    ]
    try:
        with attacks[0].half_open() as held, ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda one: one.run(seconds), attacks))  # raises the error of any of them
    finally:
        for one in attacks:
            one.close()
    total = sum((one.done for one in attacks), Counter())
    total["half_open"] = held
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack every port of a cluster on this machine.")
    parser.add_argument("scheduler", metavar="ADDRESS", help="tcp://127.0.0.1:PORT of the scheduler")
    parser.add_argument("--seconds", type=float, default=30.0, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--curve", metavar="DIR", help="keys of the cluster: a worker's")
    arguments = parser.parse_args()
    keys = None if arguments.curve is None else Keys.load(arguments.curve, "worker")
    endpoints = endpoints_of(arguments.scheduler, keys)
    done = attack(
        arguments.scheduler, endpoints, arguments.seconds, keys=keys, threads=arguments.threads, seed=arguments.seed
    )
    for what, times in sorted(done.items()):
        sys.stdout.write(f"{what:24}{times:8}\n")
    after = endpoints_of(arguments.scheduler, keys)
    sys.stdout.write("the cluster answers\n" if after == endpoints else "the cluster is another one\n")
    return 0 if after == endpoints else 1


if __name__ == "__main__":
    sys.exit(main())
