"""What is shipped, and that nothing but `mla_fx` reaches anybody's site-packages.

An editable install finds packages that pyproject does not list, a wheel does
not: so the list is compared with the disk.  With --packaging, each way to
install is taken: into a fresh environment, looked at from another folder.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("effects", "backends", "models")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    found = set()
    for top in ("mla_fx", *LINKED):
        for folder, _, files in os.walk(ROOT / top):  # does not follow the links in mla_fx/
            if any(name.endswith(".py") for name in files):
                parts = Path(folder).relative_to(ROOT).parts
                found.add(".".join(parts if top == "mla_fx" else ("mla_fx", *parts)))
    return found


def test_every_package_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


@pytest.mark.parametrize("name", LINKED)
def test_links_point_at_the_folders(name):
    assert os.readlink(ROOT / "mla_fx" / name) == f"../{name}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_links_are_links_in_git():
    """A copy instead of a link would be a second identity of every class in it."""
    paths = [f"mla_fx/{name}" for name in LINKED]
    listing = subprocess.run(["git", "ls-files", "-s", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    entries = {line.split("\t")[1]: line.split()[0] for line in listing.stdout.splitlines()}
    assert entries == dict.fromkeys(paths, "120000")


def test_torch_is_pinned_to_one_release():
    assert "torch==2.13.0" in PROJECT["project"]["dependencies"]


@pytest.mark.parametrize("name", LINKED)
def test_folders_refuse_a_second_identity(name):
    """From the checkout's root, `import effects` would make a second class of every class."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"import this package as 'mla_fx.{name}', not '{name}'" in done.stderr


def run(*command: str | Path, cwd: Path) -> str:
    """What a command printed; both its streams are in the error when it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@attrs.frozen
class Environment:
    """A fresh environment: `mla_fx` as some installer put it, and the dependencies of the running one behind it."""

    folder: Path
    kind: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    def metadata(self) -> Path:
        (found,) = self.site.glob("mla_fx-*.dist-info")
        return found

    def execute(self, code: str) -> str:
        """Run code from a folder that has nothing to do with the checkout."""
        return run(self.python, "-I", "-c", code, cwd=self.folder)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout, so that builds neither find nor leave anything in the real one."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    left_behind = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", "__pycache__")
    return Path(shutil.copytree(ROOT, copy, symlinks=True, ignore=left_behind))


@pytest.fixture(scope="module")
def built(checkout):
    """A source distribution, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--outdir", checkout.parent / "dist", checkout, cwd=checkout.parent)
    return checkout.parent / "dist"


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable", "git"])
def installed(request, checkout, built, tmp_path_factory):
    """`mla_fx` installed in one of the ways; "git" takes what is committed, the others what lies in the checkout."""
    if request.param == "git" and not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    what = {
        "wheel": lambda: [next(built.glob("*.whl"))],
        "sdist": lambda: [next(built.glob("*.tar.gz"))],
        "editable": lambda: ["--editable", checkout],
        "git": lambda: [f"git+{ROOT.as_uri()}"],
    }[request.param]()
    environment = Environment(tmp_path_factory.mktemp(request.param), request.param)
    run(sys.executable, "-m", "venv", "--without-pip", environment.folder, cwd=checkout.parent)
    pip = [sys.executable, "-m", "pip", "--python", environment.python, "install", "--quiet"]
    run(*pip, "--no-deps", "--force-reinstall", *what, cwd=checkout.parent)
    (environment.site / "behind.pth").write_text(sysconfig.get_paths()["purelib"])
    return environment


@pytest.mark.packaging
def test_only_mla_fx_reaches_site_packages(installed):
    present = {path.name for path in installed.site.iterdir()}
    mark = "__editable__"  # a finder and the line that loads it: an editable install's own files
    present = {name for name in present if not (installed.kind == "editable" and name.startswith(mark))}
    package = set() if installed.kind == "editable" else {"mla_fx"}
    assert present - {"__pycache__"} == package | {installed.metadata().name, "behind.pth"}


@pytest.mark.packaging
def test_every_module_imports_from_elsewhere(installed, checkout):
    walk = """
import importlib, pkgutil, mla_fx
import mla_fx.effects.ops, mla_fx.backends.cpu, mla_fx.backends.ascend.emulator, mla_fx.models
print(mla_fx.__file__)
for module in pkgutil.walk_packages(mla_fx.__path__, "mla_fx."):
    try:
        print(module.name, importlib.import_module(module.name).__file__)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":  # which kernels need, and who has no device for them has none
            raise
"""
    first, *modules = installed.execute(walk).splitlines()
    home = checkout if installed.kind == "editable" else installed.site
    assert Path(first) == home / "mla_fx" / "__init__.py"
    assert all(Path(line.split()[1]).is_relative_to(home) for line in modules)
    assert {line.split()[0] for line in modules} >= packages_on_disk() - {"mla_fx"}


@pytest.mark.packaging
@pytest.mark.parametrize("name", LINKED)
def test_folders_are_not_importable_by_themselves(installed, name):
    attempt = f"""
try:
    import {name}
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert installed.execute(attempt).strip() == name


@pytest.mark.packaging
def test_the_law_is_at_hand(installed):
    small = """
from mla_fx import MlaConfig, StepShape, attention_step, orchestrations
from mla_fx.effects import check, schedule
check(schedule(attention_step(MlaConfig.deepseek_v3(), StepShape(ranks=8)), orchestrations.attention_aside))
print("legal")
"""
    assert installed.execute(small) == "legal\n"


@pytest.mark.packaging
def test_console_script_runs(installed):
    script = installed.folder / "bin" / "mla-fx"
    help_text = run(script, "--help", cwd=installed.folder)
    assert all(command in help_text for command in ("decode", "show", "check"))
    run(script, "check", cwd=installed.folder)
    assert "> 9 + 4 =\n13\n" in run(script, "generate", "--prompt", "9 + 4 =", cwd=installed.folder)  # model and all


@pytest.mark.packaging
def test_metadata_and_markers(installed):
    metadata = message_from_string((installed.metadata() / "METADATA").read_text())
    assert (metadata["Name"], metadata["License-Expression"]) == ("mla-fx", "Apache-2.0")
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert (installed.metadata() / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    typed = "import importlib.resources as r; print((r.files('mla_fx') / 'py.typed').is_file())"
    assert installed.execute(typed) == "True\n"


@pytest.mark.packaging
def test_wheel_has_every_module_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    found = (path for top in ("mla_fx", *LINKED) for path in (ROOT / top).glob("**/*"))
    modules = {path.relative_to(ROOT) for path in found if path.suffix in (".py", ".cpp", ".h")}
    inside = {path if path.parts[0] == "mla_fx" else Path("mla_fx") / path for path in modules}
    data = {"mla_fx/py.typed"}
    for package, names in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = Path("mla_fx") / Path(*package.split(".")[1:])
        source = ROOT / folder.relative_to("mla_fx") if package != "mla_fx" else ROOT / "mla_fx"
        data |= {(folder / path.name).as_posix() for name in names for path in source.glob(name)}
    assert {"mla_fx/models/addition/model.safetensors", "mla_fx/models/addition/tokenizer.json"} <= data
    assert shipped == {path.as_posix() for path in inside} | data


@pytest.mark.packaging
@pytest.mark.parametrize("installed", ["editable"], indirect=True)
def test_new_modules_are_seen_without_installing_again(checkout, installed):
    new = checkout / "effects" / "ops" / "brand_new.py"
    new.write_text("HERE = 1\n")
    assert installed.execute("from mla_fx.effects.ops.brand_new import HERE; print(HERE)") == "1\n"
    new.unlink()
