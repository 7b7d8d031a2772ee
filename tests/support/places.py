"""An object store for tests, connections to it that can be cut, full disks, and users without permissions."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_fakes import Wire
from shoal.storage.base import FileWriter

BUCKET = "places"


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """Run a server that speaks S3, with one bucket: its address.

    Meanwhile all sessions of botocore share a loader: each would parse the descriptions of the service, for 0.2 s. And
    the server lists the folders of its library once: it would do it twice for each request, for 4 ms. An object is put
    by one thread at a time: between the check of If-Match and the write the server would let another one through.
    """
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    sessions = pytest.importorskip("botocore.session")
    responses = pytest.importorskip("moto.s3.responses").S3Response
    put, lock = responses.put_object, threading.Lock()

    def put_object(self: Any) -> Any:
        with lock:
            return put(self)

    services = list(pytest.importorskip("moto.backends").list_of_moto_modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "create_loader", functools.cache(sessions.create_loader))
        patch.setattr(responses, "put_object", put_object)
        patch.setattr("moto.backends.list_of_moto_modules", lambda: services)
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket=BUCKET)
        yield f"http://{host}:{port}"
        server.stop()


def options(endpoint: str) -> dict[str, Any]:
    once = {"connect_timeout": 60, "read_timeout": 60, "retries": {"max_attempts": 1}}  # a lost one refuses at once
    return {"endpoint_url": endpoint, "config_kwargs": once, "skip_instance_cache": True}


def uploads(endpoint: str, under: str) -> list[Any]:
    """List the uploads that are under way in a folder: another test's may be left, whose connection was lost."""
    import boto3

    reported = boto3.client("s3", endpoint_url=endpoint).list_multipart_uploads(Bucket=BUCKET)
    return [one for one in reported.get("Uploads", []) if one["Key"].startswith(f"{under}/")]


@contextlib.contextmanager
def cut_connection(endpoint: str) -> Iterator[Wire]:
    """A connection to the server that can be broken off and ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s3fs.S3FileSystem.retries", 2)
        with contextlib.closing(Wire(endpoint.replace("http", "tcp"))) as made:
            yield made


@contextlib.contextmanager
def after_writes(count: int, what: Callable[[], None]) -> Iterator[None]:
    """Run a function at one of the writes to files."""
    left = [count]
    real = FileWriter.write

    def write(target: FileWriter, data: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            real(target, bytes(data)[: len(bytes(data)) // 2])
            what()
        real(target, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWriter, "write", write)
        yield


def interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def full_disk(folder: Path, room: int) -> Iterator[None]:
    """A small tmpfs on ``folder``, where this process may mount one; else no file of this process may be longer."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Become a user without permissions, if this process may."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
