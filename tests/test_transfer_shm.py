import dataclasses
import os
import socket
import threading

import pytest
from transfer_kit import linked, make_pool, peer_of, read_of

from kv_transfer.shm import REGISTRY, Ask, ShmExport
from kv_transfer.shm_reader import open_shm
from pdserve.errors import ConfigError, TransferError
from pdserve.messages import LinkOffer


@pytest.fixture
def pair(tmp_path):
    with linked("shm", tmp_path) as pair:
        yield pair


def ask(pair, data):
    """What the owner's socket answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5)
        client.connect(pair.peer.links[0].address)
        client.send(data)
        return client.recv(4096)


def test_the_socket_lies_in_a_folder_of_this_user_alone(pair):
    folder = os.path.dirname(pair.peer.links[0].address)
    assert os.stat(folder).st_mode & 0o777 == 0o700


def test_a_folder_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    pool = make_pool()
    with pytest.raises(ConfigError, match="mode 0700"):
        ShmExport(pool, folder=tmp_path, name="kv")
    pool.close()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    pool = make_pool()
    with pytest.raises(ConfigError, match="107 bytes"):
        ShmExport(pool, folder=tmp_path / "run", name="x" * 108)
    pool.close()


@pytest.mark.parametrize("data", [b"\x00", b"\xff" * 9, b"\x80\x04.", REGISTRY.encode(Ask(epoch=""))[:-1]], ids=repr)
def test_nonsense_on_the_socket_is_counted_and_the_next_reader_is_served(pair, data):
    assert ask(pair, data) == b""
    pair.open().close()
    assert pair.exports.num_ignored == 1


def test_a_client_that_says_nothing_is_left_behind(pair):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(pair.peer.links[0].address)
        reader = pair.open()
        assert not reader.is_broken
        reader.close()


def test_closing_the_export_removes_the_socket(tmp_path):
    pool = make_pool()
    export = ShmExport(pool, folder=tmp_path / "run", name="kv")
    export.close()
    export.close()
    assert os.listdir(tmp_path / "run") == []
    with pytest.raises(TransferError) as caught:
        open_shm(export.offer, peer_of(pool, [export.offer]), pool)
    assert caught.value.reason == "peer_gone"
    pool.close()


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_opening_and_closing_leaks_no_descriptor(pair):
    before = num_descriptors()
    for _ in range(20):
        pair.open().close()
    assert num_descriptors() < before + 10  # the owner's end of the last one may still be open


@pytest.mark.parametrize(
    ("change", "reason"), [({"epoch": "older"}, "epoch"), ({"num_blocks": 32}, "layout")], ids=["epoch", "size"]
)
def test_a_pool_that_is_not_the_one_in_the_roster_is_refused(pair, change, reason):
    before = num_descriptors()
    for _ in range(20):
        with pytest.raises(TransferError) as caught:
            pair.open(dataclasses.replace(pair.peer, **change))
    assert caught.value.reason == reason
    assert num_descriptors() < before + 10


@pytest.mark.parametrize("reply", [b"", b"nonsense", REGISTRY.encode(Ask(epoch="x"))])
def test_an_owner_that_answers_nonsense_is_a_failed_open(tmp_path, reply):
    pool = make_pool()
    path = str(tmp_path / "fake")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)

        def answer():
            client, _ = listener.accept()
            client.recv(4096)
            client.send(reply)
            client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferError) as caught:
            open_shm(LinkOffer(kind="shm", address=path), peer_of(pool, []), pool)
        thread.join()
    assert caught.value.reason == "malformed_reply"
    pool.close()


def test_reads_go_on_in_slices_within_their_budget(pair):
    sources, destinations = list(range(1, 60)), list(range(1, 60))
    pair.reader.start(read_of(pair.owner, sources, destinations, "long"))
    pair.reader.start(read_of(pair.owner, [60], [60], "short"))
    results = []
    while pair.reader.num_pending:
        results += pair.reader.poll(0.0)  # one slice
    assert [result.read_id for result in results] == ["long", "short"]


def test_a_memfd_pool_is_mapped_and_a_private_one_is_read(tmp_path):
    with linked("shm", tmp_path / "a") as private, linked("shm", tmp_path / "b", shared=True) as shared:
        assert (private.reader.how, shared.reader.how) == ("process_vm_readv", "memfd")
        assert private.exports.notes == ()
        assert "memfd" in shared.exports.notes[0]
