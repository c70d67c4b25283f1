"""The files by which commands find a running server."""

import dataclasses
import os
import stat

import pytest

from pdserve.errors import ConfigError
from pdserve.runtime import (
    RuntimeRecord,
    live_records,
    private_folder,
    remove_record,
    started_ticks,
    the_only_record,
    write_record,
)


def record(port=8000):
    return RuntimeRecord(
        base_url=f"http://127.0.0.1:{port}", admin_url="http://127.0.0.1:9", admin_key="k", pid=os.getpid(),
        started_ticks=started_ticks(os.getpid()),
    )  # fmt: skip


def test_a_record_is_private_from_its_first_moment(tmp_path):
    path = write_record(tmp_path / "run", 8000, record())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [item.name for item in path.parent.iterdir()] == ["8000.json"]


def test_the_only_live_record_is_found(tmp_path):
    write_record(tmp_path, 8000, record())
    assert the_only_record(tmp_path) == record()


def test_a_dead_servers_record_is_not_followed(tmp_path):
    write_record(tmp_path, 8000, dataclasses.replace(record(), started_ticks=1))
    write_record(tmp_path, 8001, dataclasses.replace(record(), pid=2**22 + 1))
    (tmp_path / "8002.json").write_text("{")
    assert live_records(tmp_path) == []
    with pytest.raises(ConfigError, match="no server of this user"):
        the_only_record(tmp_path)


def test_two_live_servers_have_to_be_told_apart(tmp_path):
    write_record(tmp_path, 8000, record(8000))
    write_record(tmp_path, 8001, record(8001))
    with pytest.raises(ConfigError, match=":8000, .*:8001"):
        the_only_record(tmp_path)
    assert the_only_record(tmp_path, port=8001) == record(8001)
    with pytest.raises(ConfigError, match="on port 80;"):
        the_only_record(tmp_path, port=80)


def test_a_server_removes_its_own_record_only(tmp_path):
    path = write_record(tmp_path, 8000, record())
    remove_record(tmp_path, 8000, pid=1)
    assert path.exists()
    remove_record(tmp_path, 8000, pid=os.getpid())
    assert not path.exists()


def test_an_open_folder_is_closed_and_a_link_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="not a folder of this user"):
        private_folder(tmp_path / "link")


def test_a_process_that_is_not_there_never_started():
    assert started_ticks(2**22 + 1) is None
