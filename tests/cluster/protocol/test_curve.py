"""Keys: their files, who is let in by them, and who is not."""

import json
import os
import stat
import threading

import pytest
import zmq

from shoal import cli
from shoal.cluster.protocol import curve
from shoal.cluster.protocol.curve import Guard, Keys, make_keys


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Echo:
    """A guarded socket that sends back what it gets."""

    def __init__(self, context, keys):
        self.socket = context.socket(zmq.ROUTER)
        keys.secure_server(self.socket)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()
        self.socket.close(0)

    def run(self):
        while not self.end.is_set():
            if self.socket.poll(50):
                self.socket.send_multipart(self.socket.recv_multipart())


def client(context, address, *, prepare=lambda socket: None):
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    prepare(socket)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
    socket.connect(address)
    return socket, monitor


FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def gets_in(context, address, prepare):
    """Whether a client's handshake succeeds and its message comes back."""
    from zmq.utils.monitor import recv_monitor_message

    socket, monitor = client(context, address, prepare=prepare)
    try:
        assert monitor.poll(30_000), "no end of the handshake"
        if recv_monitor_message(monitor)["event"] & FAILED:
            assert not socket.poll(0)
            return False
        socket.send(b"there?")
        assert socket.poll(30_000), "let in, but not answered"
        return socket.recv() == b"there?"
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


def test_secret_files_are_the_owner_s_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert [file.name for file in made[:2]] == ["scheduler.key", "scheduler.key_secret"]
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    for file in made:
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if file.suffix == ".key_secret" else 0o644)
        assert ("secret-key" in file.read_text()) == (file.suffix == ".key_secret")


def test_a_secret_that_others_can_read_is_refused(folder):
    (folder / "server.key_secret").chmod(0o640)
    with pytest.raises(
        ValueError, match=r"server.key_secret can be read by others than its owner \(mode 0640\): chmod"
    ):
        Keys.load(folder, "server")


def test_keys_that_are_there_are_not_replaced(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "scheduler.key").unlink()
    with pytest.raises(ValueError, match=r"scheduler.key_secret exists already"):
        make_keys(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: text for name, text in before.items() if name != "scheduler.key"
    }


def test_a_command_takes_the_secret_of_any_role(folder, capsys):
    assert Keys.load_any(folder) == Keys.load(folder, "worker")
    (folder / "worker.key_secret").unlink()
    (folder / "scheduler.key_secret").unlink()
    assert Keys.load_any(folder) == Keys.load(folder, "server")
    command = ["cluster", "tcp://127.0.0.1:1", "status", "--curve", str(folder), "--timeout", "0.05"]
    assert cli.main(command) == 1  # nobody is there
    assert "key_secret" not in capsys.readouterr().err
    (folder / "server.key_secret").unlink()
    assert cli.main(command) == 2
    assert "worker.key_secret: No such file or directory; copy it here" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["", "../worker", "a/b", "a.b"])
def test_a_role_that_cannot_be_a_file_s_name_is_refused(tmp_path, role):
    with pytest.raises(ValueError, match="cannot name keys"):
        make_keys(tmp_path / "keys", [role])
    assert not (tmp_path / "keys").exists()


def test_a_missing_or_damaged_file_is_named_with_the_remedy(tmp_path, folder):
    with pytest.raises(ValueError, match=r"nowhere/worker.key_secret: No such file.*shoal keygen"):
        Keys.load(tmp_path / "nowhere", "worker")
    with pytest.raises(ValueError, match=r"nobody.key_secret: No such file.*copy it here, the secret of the nobody"):
        Keys.load(folder, "nobody")  # where shoal keygen refuses to replace the others
    keys = Keys.load(folder, "worker")
    (folder / "server.key").unlink()
    with pytest.raises(ValueError, match=r"server.key is missing.*copy it here"):
        keys.public_of("server")
    for text in ("curve\n", 'public-key = "short"\n', f'public-key = "{"~" * 40}"\n', f'public-key = "{"#" * 40}"\n'):
        (folder / "server.key").write_text(text)
        with pytest.raises(ValueError, match=r"server.key"):
            keys.public_of("server")
    (folder / "worker.key_secret").write_text((folder / "worker.key").read_text())
    with pytest.raises(ValueError, match="does not hold a secret key: copy it again"):
        Keys.load(folder, "worker")


def test_a_secret_key_is_not_told_by_repr(folder):
    keys = Keys.load(folder, "worker")
    assert keys.secret.decode() not in repr(keys)
    assert keys.public.decode() in repr(keys)


def test_who_is_let_in_are_the_key_files(folder, caplog):
    make_keys(folder, ["alice"])
    assert set(curve.allowed(folder).values()) == {"alice", "scheduler", "server", "worker"}
    (folder / "alice.key").write_text("nothing\n")
    assert set(curve.allowed(folder).values()) == {"scheduler", "server", "worker"}
    assert "alice.key" in caplog.text


def test_only_listed_keys_get_in_and_the_list_may_change(tmp_path, folder, context):
    make_keys(tmp_path / "others")
    server = Keys.load(folder, "server")
    worker = Keys.load(folder, "worker")
    stranger = Keys.load(tmp_path / "others", "worker")

    def as_stranger(socket):
        stranger.client_of("server")(socket)
        socket.setsockopt(zmq.CURVE_SERVERKEY, worker.public_of("server"))

    with zmq.Context() as clients, Guard(context, server) as guard, Echo(context, server) as echo:
        assert gets_in(clients, echo.address, worker.client_of("server"))
        assert not gets_in(clients, echo.address, as_stranger)
        assert not gets_in(clients, echo.address, lambda socket: None)
        assert guard.admitted == 1  # who shows no key at all never gets so far
        assert guard.refused >= 1
        (folder / "stranger.key").write_bytes((tmp_path / "others" / "worker.key").read_bytes())
        assert gets_in(clients, echo.address, as_stranger)
        (folder / "stranger.key").unlink()
        assert not gets_in(clients, echo.address, as_stranger)


def test_a_server_that_is_not_the_one_expected_is_not_spoken_to(tmp_path, folder, context):
    make_keys(tmp_path / "others")
    impostor = Keys.load(tmp_path / "others", "server")
    worker = Keys.load(folder, "worker")
    with Guard(context, impostor) as guard, Echo(context, impostor) as echo, zmq.Context() as clients:
        assert not gets_in(clients, echo.address, worker.client_of("server"))
        assert guard.admitted == 0


def test_without_a_guard_nobody_gets_in(folder, context):
    server, worker = Keys.load(folder, "server"), Keys.load(folder, "worker")
    with zmq.Context() as clients, Echo(context, server) as echo:
        assert not gets_in(clients, echo.address, worker.client_of("server"))


def test_keygen_makes_them_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["keygen", "--output", "keys"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "keys/scheduler.key_secret  secret"
    assert cli.main(["keygen", "--output", "keys", "--role", "alice", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["keys/alice.key", "keys/alice.key_secret"]
    assert cli.main(["keygen", "--output", "keys"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Keys.load("keys", "alice").role == "alice"


def test_a_directory_that_cannot_be_read_lets_nobody_in_and_the_guard_goes_on(tmp_path, monkeypatch, caplog):
    make_keys(tmp_path)
    keys = Keys.load(tmp_path, "worker")
    with zmq.Context() as context, Guard(context, Keys.load(tmp_path, "server")) as guard:
        monkeypatch.setattr("shoal.cluster.protocol.curve.allowed", lambda directory: os.listdir("/nowhere/at/all"))
        assert not any(guard.callback("shoal", keys.public) for _ in range(50))
        monkeypatch.undo()
        assert guard.callback("shoal", keys.public)
        assert (guard.admitted, guard.refused) == (1, 50)
        assert not any(guard.callback("shoal", b"x" * 40) for _ in range(50))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"the keys in {tmp_path} cannot be read, so all peers are rejected",
        f"refused a peer whose key is not in {tmp_path}",
    ]
