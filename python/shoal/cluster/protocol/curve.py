"""The keys of a cluster: authentication of its processes by CURVE.

One directory holds the keys of a cluster, made by ``shoal keygen``. Each role has a pair; its file names are::

    scheduler.key  server.key  worker.key                        public: accepted peers
    scheduler.key_secret  server.key_secret  worker.key_secret   secret, mode 0600: own identity

A process needs the secret of its own role and the public keys of those it connects to; one that listens accepts
exactly the keys that have a ``.key`` file in its directory. The directory is read for each connection, so adding a file
accepts a peer, and removing it rejects the peer from its next connection on. docs/security.md describes what this
protects.

The files are those of ZeroMQ's certificates; the messages are encrypted and authenticated by its CURVE mechanism.

Threads: keys are immutable. A guard runs a thread of its own; it is started and stopped by one.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.auth.certs import load_certificate
from zmq.utils import z85

from shoal.base.machine import local_path
from shoal.cluster.protocol.refusals import Refusals
from shoal.errors import NotConnectedError

DOMAIN = "shoal"  # ZAP domain of the sockets of shoal
ROLES = ("scheduler", "server", "worker")

_log = logging.getLogger("shoal.curve")

_SECRET = "# The secret key of one role of a shoal cluster. Its holder can act as that role: keep it secret."
_PUBLIC = "# A public key of a shoal cluster: its owner is admitted where this file is in the key directory."


def make_keys(directory: str | os.PathLike[str], roles: Sequence[str] = ROLES) -> list[Path]:
    """Make a new pair of keys for each role.

    A secret file has mode 0600 from the moment it exists.
    """
    if not zmq.has("curve"):
        raise ValueError("this libzmq was built without CURVE: install pyzmq's wheel")
    folder = local_path(directory)
    for role in roles:
        if not role or not all(letter.isalnum() or letter in "-_" for letter in role):
            raise ValueError(f"{role!r} cannot name keys: use letters, digits, - and _")
        for there in (_public_file(folder, role), _secret_file(folder, role)):
            if there.exists():
                raise ValueError(
                    f"{there} exists already, and processes that use it would be rejected: remove it first"
                )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    for role in roles:
        public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
        lines = {
            _public_file(folder, role): (0o644, [_PUBLIC, "curve", f'    public-key = "{public}"']),
            _secret_file(folder, role): (
                0o600,
                [_SECRET, "curve", f'    public-key = "{public}"', f'    secret-key = "{secret}"'],
            ),
        }
        for file, (mode, text) in lines.items():
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as out:
                out.write("\n".join([*text, ""]))
            made.append(file)
    return made


def allowed(directory: str | os.PathLike[str]) -> dict[bytes, str]:
    """Read the accepted keys: the names of the public keys in a directory, by key (Z85).

    Files that are not keys are skipped, with a warning in the log.
    """
    found = {}
    for file in sorted(local_path(directory).glob("*.key")):
        try:
            found[_checked(load_certificate(file)[0], file)] = file.stem
        except (OSError, ValueError) as error:
            _log.warning("not a key, ignored: %s", error)
    return found


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one process."""

    # Directory of the keys.
    directory: Path
    # Role of this process.
    role: str
    # public, secret: Its own pair, 40 characters of Z85 each.
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], role: str) -> Self:
        """Read the pair of a role."""
        folder = local_path(directory)
        file = _secret_file(folder, role)
        try:
            found = file.stat()
        except OSError as error:
            remedy = f"make keys with: shoal keygen --output {folder}"
            if any(folder.glob("*.key*")):  # it would refuse: the others are in use
                remedy = f"copy it here, the secret of the {role}, from where the keys were made"
            raise ValueError(f"{file}: {error.strerror}; {remedy}") from None
        mode = stat.S_IMODE(found.st_mode)
        # A file of another user was given to this process's group on purpose, as Kubernetes gives secrets.
        if mode & (0o077 if found.st_uid == os.getuid() else 0o037):
            raise ValueError(f"{file} can be read by others than its owner (mode {mode:04o}): chmod 600 {file}")
        public, secret = load_certificate(file)
        if secret is None:
            raise ValueError(f"{file} does not hold a secret key: copy it again from where the keys were made")
        return cls(folder, role, _checked(public, file), _checked(secret, file))

    @classmethod
    def load_any(cls, directory: str | os.PathLike[str]) -> Self:
        """Read the pair of the worker, or of another role if its secret is not there: each may ask a scheduler."""
        folder = local_path(directory)
        there = [role for role in ("worker", *ROLES) if os.path.exists(_secret_file(folder, role))]
        return cls.load(folder, there[0] if there else "worker")

    def public_of(self, role: str) -> bytes:
        """Read the public key of another role."""
        file = _public_file(self.directory, role)
        try:
            return _checked(load_certificate(file)[0], file)
        except OSError:
            raise ValueError(
                f"{file} is missing, and without it the {role} cannot be authenticated: copy it here from "
                f"where the keys were made"
            ) from None

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make an unbound socket require keys of its peers.

        Needs a :class:`Guard` on the socket's context: without one all peers are rejected.
        """
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def client_of(self, role: str) -> Callable[[zmq.Socket[Any]], None]:
        """Return a function that makes an unconnected socket authenticate itself, and accept only a ``role``."""
        server = self.public_of(role)

        def secure(socket: zmq.Socket[Any]) -> None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

        return secure


class Guard:
    """Accepts the peers whose keys are in a directory. A context manager."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        # admitted, refused: Connections so far.
        self.admitted = 0
        self.refused = 0
        self._refusals = Refusals(_log)
        self._directory = keys.directory
        self._checks = ThreadAuthenticator(context, log=logging.getLogger("shoal.curve.zap"))
        try:
            self._checks.start()
            self._checks.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        except BaseException:  # its sockets would prevent the end of the context
            thread = self._checks.thread
            if thread is not None and thread.pipe is not None and not thread.is_alive():
                thread.pipe.close()
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer is accepted; called by :mod:`zmq.auth` for each connection."""
        try:
            name = allowed(self._directory).get(key)
        except Exception as error:  # an exception would end the calling thread, which serves all connections
            self.refused += 1
            self._refusals.add(
                "unread", f"the keys in {self._directory} cannot be read, so all peers are rejected: {error}"
            )
            return False
        if name is None:
            self.refused += 1
            shown = key.decode("ascii", "replace")
            self._refusals.add("key", f"refused a peer whose key is not in {self._directory}: {shown}")
            return False
        self.admitted += 1
        return True

    def check(self) -> None:
        """Raise an error if the thread has ended: no further peer could connect."""
        if not self._checks.is_alive():
            raise NotConnectedError(
                "the thread that checks the keys of connections has ended: start this process again"
            )

    def stop(self) -> None:
        """End the thread. Further peers are rejected; existing connections stay."""
        if self._checks.pipe is not None and not self._checks.is_alive():
            self._checks.pipe.close()  # to a thread that has ended nothing can be sent: it would block
            self._checks.pipe = None  # type: ignore[assignment]
        self._checks.stop()


def _public_file(directory: Path, role: str) -> Path:
    return directory / f"{role}.key"


def _secret_file(directory: Path, role: str) -> Path:
    return directory / f"{role}.key_secret"


def _checked(key: bytes, file: Path) -> bytes:
    try:
        fits = len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):
        fits = False
    if not fits:
        raise ValueError(f"{file} does not hold a key of 40 characters: copy it again from where the keys were made")
    return key
