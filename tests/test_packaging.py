"""What the wheel carries, and that nothing but `mla_fx` reaches anybody's site-packages.

An editable install finds packages that pyproject does not list, a wheel does
not: so the list is compared with the disk, and each way to install is tried.
"""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("effects", "backends", "models")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    found = set()
    for top in ("mla_fx", *LINKED):
        for folder, _, files in os.walk(ROOT / top):  # does not follow the links in mla_fx/
            if "__init__.py" in files:
                parts = Path(folder).relative_to(ROOT).parts
                found.add(".".join(parts if top == "mla_fx" else ("mla_fx", *parts)))
    return found


def test_every_package_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_links_point_at_the_folders():
    for name in LINKED:
        assert (ROOT / "mla_fx" / name).is_symlink()
        assert (ROOT / "mla_fx" / name).resolve() == (ROOT / name).resolve()


def test_torch_is_pinned_to_one_release():
    assert "torch==2.13.0" in PROJECT["project"]["dependencies"]


@pytest.mark.parametrize("name", LINKED)
def test_folders_refuse_a_second_identity(name):
    """From the checkout's root, `import effects` would make a second class of every class."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"import this package as 'mla_fx.{name}', not '{name}'" in done.stderr


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], cwd=ROOT, check=True)


def everything_in(folder: Path) -> set[str]:
    """Top-level names in a folder that pip installed into, metadata and scripts aside."""
    return {p.name for p in folder.iterdir() if not p.name.endswith(".dist-info") and p.name not in ("bin", "__pycache__")}


PROBE = """
import mla_fx, pathlib, sys
from mla_fx import backends, models, orchestrations
from mla_fx.effects import check, ops, schedule
from mla_fx.backends import cpu, reference
here = pathlib.Path(mla_fx.__file__).parent
assert str(here).startswith(sys.argv[1]), here
assert (here / "py.typed").is_file()
step = mla_fx.attention_step(mla_fx.MlaConfig.deepseek_v3(), mla_fx.StepShape(ranks=8))
check(schedule(step, orchestrations.attention_aside))
for name in ("effects", "backends", "models"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} reached site-packages")
"""


def probe(folder: Path, elsewhere: Path) -> None:
    """Import what lies in `folder` from another place, with the running environment behind it for torch and attrs."""
    run = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{PROBE}", str(folder)]
    subprocess.run(run, cwd=elsewhere, check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True, capture_output=True)
    return out


@pytest.mark.packaging
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_wheel_and_sdist(built, kind, tmp_path):
    (archive,) = built.glob(kind)
    pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(archive))
    assert everything_in(tmp_path / "site") == {"mla_fx"}
    (metadata,) = (tmp_path / "site").glob("mla_fx-*.dist-info")
    assert (metadata / "licenses" / "LICENSE").is_file()
    assert "mla-fx = mla_fx.cli:main" in (metadata / "entry_points.txt").read_text()
    probe(tmp_path / "site", tmp_path)


@pytest.mark.packaging
def test_wheel_has_every_module(built):
    (wheel,) = built.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    sources = {p.relative_to(ROOT) for top in ("mla_fx", *LINKED) for p in (ROOT / top).rglob("*.py") if top in p.parts}
    here = {str(p) if p.parts[0] == "mla_fx" else f"mla_fx/{p}" for p in sources}
    assert shipped == here


@pytest.mark.packaging
def test_straight_from_git(tmp_path):
    """The committed state, as `pip install git+...` takes it."""
    pip("install", "--no-deps", "--target", str(tmp_path / "site"), f"git+file://{ROOT}")
    assert everything_in(tmp_path / "site") == {"mla_fx"}
    probe(tmp_path / "site", tmp_path)


@pytest.mark.packaging
def test_editable(tmp_path):
    """New modules are seen without installing again, and the folders stay out of the way."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "--quiet", "install", "--no-deps", "--editable", ROOT], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True
    ).stdout.strip()
    for name in LINKED:
        run = [python, "-P", "-c", f"import importlib.util as u; assert u.find_spec('{name}') is None, u.find_spec('{name}')"]
        subprocess.run(run, cwd=tmp_path, check=True)
    found = [python, "-P", "-c", "import importlib.util as u; print(u.find_spec('mla_fx').origin)"]
    origin = subprocess.run(found, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    assert Path(origin) == ROOT / "mla_fx" / "__init__.py"
    assert not {"effects", "backends", "models", "tests"} & {p.name for p in Path(site).iterdir()}
