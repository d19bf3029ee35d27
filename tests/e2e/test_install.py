"""The steps of docs/install.md: the wheel in a fresh environment, the service, the image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shipper.model.version import __version__
from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Service, Shipper, wait_until
from tests.tools import assert_content, run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
SITE = Path(sysconfig.get_path("purelib"))
PYTHON = Path(sys._base_executable)  # type: ignore[attr-defined]
# No network: only the wheel is installed, and the pinned dependencies are those of the tests.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def section(title: str) -> str:
    return (ROOT / "docs/install.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def steps(title: str, prompt: str) -> list[str]:
    """Return the commands of each block."""
    blocks = re.findall(r"```console\n(.*?)```", section(title), re.DOTALL)
    return ["".join(line.removeprefix(f"{prompt} ") for line in block.splitlines(keepends=True)) for block in blocks]


def link_dependencies(environment: Path) -> None:
    (folder,) = environment.glob("lib/python*/site-packages")
    (folder / "dependencies.pth").write_text(f"{SITE}\n")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


EXAMPLES = files_in(CONFIG)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel") / "dist"
    command = shlex.split(steps("Wheel", "$")[0])
    assert command[:2] == ["pip", "wheel"]
    command = [str(folder) if word == "dist" else word for word in command[1:]]
    assert_content(run(sys.executable, "-m", "pip", *command, cwd=ROOT, env=os.environ | OFFLINE))
    (path,) = folder.glob("*.whl")
    return path


def test_wheels_built_from_the_tree_or_the_source_archive_contain_the_examples_and_the_man_page(
    wheel: Path, tmp_path: Path
):
    assert wheel.name == f"acquisition_shipper-{__version__}-py3-none-any.whl"
    assert wheel.name in section("systemd")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    examples = {name.removeprefix("shipper/examples/"): data for name, data in files.items() if "/examples/" in name}
    assert examples == EXAMPLES
    (page,) = (data for name, data in files.items() if name.endswith(".data/data/share/man/man1/shipper.1"))
    assert page == (ROOT / "docs/shipper.1").read_bytes()
    make = "from hatchling.build import build_sdist as make; make(__import__('sys').argv[1])"
    assert_content(run(sys.executable, "-c", make, tmp_path, cwd=ROOT))
    (source,) = tmp_path.glob("*.tar.gz")
    assert_content(run("tar", "-xf", source, "-C", tmp_path))
    unpacked = source.with_name(source.name.removesuffix(".tar.gz"))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, unpacked]
    assert_content(run(*pip, env=os.environ | OFFLINE))
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files


def test_an_installed_wheel_writes_and_checks_its_examples_and_has_its_man_page(wheel: Path, tmp_path: Path):
    environment = tmp_path / "environment"
    assert_content(run(PYTHON, "-m", "venv", "--without-pip", environment))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--no-compile"]
    assert_content(run(*pip, wheel, env=os.environ | OFFLINE))
    link_dependencies(environment)
    shipper = environment / "bin/shipper"
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "INTAKE_KEY": "k", "INTAKE_TOKEN": "t"}

    def run_installed(*arguments: str | Path) -> str:
        result = run(shipper, *arguments, env=variables, cwd=tmp_path)
        assert_content(result)
        return result.stdout

    assert re.fullmatch(rf"shipper {re.escape(__version__)} \((native|pure)\)\n", run_installed("--version"))
    run_installed("config", "examples", "--output", "examples")
    assert files_in(tmp_path / "examples") == EXAMPLES
    assert "intake.token" in run_installed("check", "--config", "examples/csv-export.toml")
    assert (environment / "share/man/man1/shipper.1").is_file()


def test_the_cargo_lock_file_is_made_before_the_native_extension_is_built():
    lock, build = steps("Wheel", "$")[1].splitlines()
    assert build.endswith(" ./native")
    assert "\nlocked = true\n" in (ROOT / "native/pyproject.toml").read_text()
    recipe = run(*shlex.split(lock), "--dry-run", "--always-make", cwd=ROOT)
    assert_content(recipe)
    assert "generate-lockfile" in recipe.stdout


# `config examples` ------------------------------------------------------------------------------------------------


def test_the_list_of_examples_has_a_line_for_each(shipper: Shipper):
    lines = shipper.run("config", "examples", configured=False).stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == sorted(EXAMPLES)
    assert all(10 < len(line.split(maxsplit=1)[1]) < 90 for line in lines)


def test_examples_are_written_world_readable_and_replace_no_file(shipper: Shipper, tmp_path: Path):
    folder = tmp_path / "deep" / "er"

    def write() -> tuple[int, str]:
        result = shipper.run("config", "examples", "--output", folder, configured=False, check=False)
        return result.returncode, result.stderr

    assert write() == (0, f"wrote {len(EXAMPLES)} files into {folder}\n")
    assert files_in(folder) == EXAMPLES
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in [folder.parent, folder, *folder.rglob("*")]}
    assert modes == {(False, 0o644), (True, 0o755)}
    assert write()[0] == 0, "the second time"
    changed, missing = folder / "systemd/shipper.toml", folder / "backfill.toml"
    changed.write_text("mine")
    missing.unlink()
    assert write() == (2, f"shipper: {changed}: already exists with other content; choose another folder\n")
    assert changed.read_text() == "mine"
    assert not missing.exists()


# systemd ----------------------------------------------------------------------------------------------------------

UNITS = sorted(CONFIG.glob("systemd/*.service"))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_installation_steps_put_the_program_where_the_units_expect_it(path: Path):
    (target,) = re.findall(r"^# ln -s \S+ (\S+)$", section("systemd"), re.MULTILINE)
    programs = re.findall(r"^Exec\w+=-?(/\S+)", path.read_text(), re.MULTILINE)
    assert set(programs) - {"/bin/sh", "/bin/kill"} == {target}


class Machine:
    """This machine with temporary overlays of the folders that an installation writes to."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid():
            pytest.skip("only root can install a service")
        for name in ("unshare", "nsenter", "setpriv", "useradd", "systemd-creds"):
            if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None:
                pytest.skip(f"{name} is not installed")
        copies = "\n".join(
            f"mkdir -p {folder}/layer{place}/upper {folder}/layer{place}/work && mount -t overlay overlay -o "
            f"lowerdir={place},upperdir={folder}/layer{place}/upper,workdir={folder}/layer{place}/work {place}"
            for place in ("/etc", "/opt", "/usr/local", "/var/lib", "/var/log")
        )
        hidden = "rm -rf /etc/shipper /opt/shipper /var/lib/shipper"  # of a real installation; only in the overlays
        script = (
            f"set -e\nmkdir {folder}/layer\nmount -t tmpfs tmpfs {folder}/layer\n{copies}\n{hidden}\necho ready\nread _"
        )
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout
        if (said := self._process.stdout.readline()) != "ready\n":
            self.close()
            pytest.skip(f"folders cannot be overlaid here: {said.strip()}")

    def command(self, *words: str | Path) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self._process.pid}/ns/mnt", *map(str, words)]

    def run(self, *words: str | Path, **options: object) -> str:
        result = run(*self.command(*words), **options)
        assert_content(result)
        return result.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.long
def test_the_installed_service_ships_as_its_user(
    machine: Machine, wheel: Path, service: Service, sample: Sample, tmp_path: Path
):
    access = service.access()
    programs = tmp_path / "programs"
    programs.mkdir()
    calls = programs / "calls"
    program(programs / "systemctl", f'echo "$@" >> {calls}')
    program(programs / "python3", f'exec /opt/python/bin/{PYTHON.name} "$@"')
    values = {
        "https://intake.example.com": service.target.base_url,
        "https://login.example.com/oauth2/v2.0/token": access["token_url"],
        '= "shipper"': f'= "{access["client_id"]}"',
        "api://intake/.default": access["scope"],
    }
    edits = " ".join(f"-e 's|{old}|{new}|'" for old, new in values.items())
    program(
        programs / "editor",
        f'sed -i {edits} "$1"; echo {service.target.subscription_key} > "$2"; echo {access["client_secret"]} > "$3"',
    )
    variables = OFFLINE | {"PATH": f"{programs}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "EDITOR": "editor"}
    first, *others = steps("systemd", "#")
    # Where the service's user can read them, regardless of who owns the project and this Python.
    for source, target in ((Path(sys.base_prefix), "/opt/python"), (SITE, "/opt/dependencies")):
        machine.run("mkdir", target)
        machine.run("mount", "--bind", source, target)
    dependencies = "echo /opt/dependencies > $(echo /opt/shipper/lib/python*/site-packages)/dependencies.pth"
    script = "\n".join(["set -e", "umask 077", f"cd {wheel.parents[1]}", first, dependencies, *others])
    machine.run("bash", "-c", script, env=variables)
    assert calls.read_text() == "daemon-reload\nenable --now shipper\nstatus shipper\n"
    unit = machine.run("cat", "/etc/systemd/system/shipper.service")
    said = machine.run("stat", "--format", "%U %a", "/etc/credstore/intake-key", "/etc/credstore/client-secret")
    assert said == "root 600\nroot 600\n"
    if analyze := shutil.which("systemd-analyze"):
        assert machine.run(analyze, "verify", "--man=no", "/etc/systemd/system/shipper.service") == ""

    # As systemd does.
    def one(directive: str) -> str:
        (value,) = re.findall(rf"^{directive}=-?(.*)$", unit, re.MULTILINE)
        return value

    user, group, more = one("User"), one("Group"), one("SupplementaryGroups")
    credentials = "/opt/credentials"
    machine.run(
        "install", "-d", "-m", one("StateDirectoryMode"), "-o", user, "-g", group, f"/var/lib/{one('StateDirectory')}"
    )
    machine.run("install", "-d", "-m", "0500", "-o", user, credentials)
    for name in re.findall(r"^LoadCredential=(.*)$", unit, re.MULTILINE):
        machine.run("install", "-m", "0400", "-o", user, f"/etc/credstore/{name}", credentials)
    machine.run("install", "-d", "-m", "0750", "-g", more, "/var/log/accounts")
    records = tmp_path / "records"
    records.write_bytes(b"".join(sample.lines[:100]))
    machine.run("install", "-m", "0640", "-g", more, records, "/var/log/accounts/acquisitions.ndjson")
    as_user = ["setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={more}", "--no-new-privs", "env", "-i"]
    as_user += ["PATH=/usr/local/bin:/usr/bin:/bin", f"CREDENTIALS_DIRECTORY={credentials}", "SHIPPER__ADMIN__LISTEN="]
    as_user += ["LD_LIBRARY_PATH=/opt/python/lib"]
    machine.run(*as_user, *shlex.split(one("ExecStartPre")), "--online", cwd="/")
    running = subprocess.Popen(
        machine.command(*as_user, *shlex.split(one("ExecStart"))), cwd="/", stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: service.stored == 100, "all records")
        running.send_signal(signal.SIGTERM)
        _, log = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 0, log
    service.assert_holds_exactly(sample.ids[:100])
    status = machine.run(*as_user, "shipper", "status", cwd="/")
    assert "everything" in status


# Completion -------------------------------------------------------------------------------------------------------


def test_bash_completes_commands_and_options_after_completion_is_installed(tmp_path: Path):
    variables = {"HOME": str(tmp_path), "PATH": f"{SHIPPER.parent}:{os.environ['PATH']}"}
    assert_content(run("bash", "-c", "shipper --install-completion; true", env=variables))

    def completed(*words: str) -> str:
        line = f". ~/.bashrc; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shipper_completion shipper"
        return run("bash", "-c", f'{line}; echo "${{COMPREPLY[@]}}"; complete -p shipper', env=variables).stdout

    for words, expected in ((("shipper", "conf"), "config"), (("shipper", "config", "examples", "--out"), "--output")):
        assert completed(*words).startswith(f"{expected}\ncomplete "), words


# The image --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_image_is_built_only_from_the_files_it_copies(tmp_path: Path):
    """The download is skipped: its packages are pinned in the lock file and already installed."""
    text = (CONFIG / "container/Containerfile").read_text().replace("\\\n", " ")
    build, final = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[1:]
    source, program = tmp_path / "source", tmp_path / "opt/shipper"
    source.mkdir()
    for line in re.findall(r"^COPY (.*)$", build, re.MULTILINE):
        *names, target = line.split()
        (source / target).parent.mkdir(exist_ok=True)
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (source / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source / target)
    download, install = re.findall(r"^RUN (.*)$", build, re.MULTILINE)
    lock, wheels = re.findall(r"--requirement (\S+)", download), re.findall(r"--dest (\S+)", download)
    assert (lock, "--require-hashes" in download) == (["requirements.lock"], True)
    assert f"--no-index --find-links {wheels[0]}" in install, "other packages than the downloaded ones"
    # The build would take the backend from the downloaded packages.
    built = tmp_path / "built"
    pip = [sys.executable, "-m", "pip", "wheel", "--wheel-dir", built, source]
    assert_content(run(*pip, env=os.environ | OFFLINE))
    assert install.endswith(" .")
    (made,) = built.glob("*.whl")
    commands = install.removesuffix(".") + str(made)
    commands = commands.replace("python -m venv", f"{PYTHON} -m venv").replace("/opt/shipper", str(program))
    commands = commands.replace("pip --python", f"{sys.executable} -m pip --python").replace(wheels[0], str(built))
    assert_content(run("/bin/sh", "-c", commands, env=os.environ | OFFLINE))
    link_dependencies(program)
    assert re.search(r"^COPY --from=build /opt/shipper /opt/shipper$", final, re.MULTILINE)
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', final, re.MULTILINE)
    (arguments,) = re.findall(r'^CMD \["(.*)"\]$', final, re.MULTILINE)
    environment = {"PATH": str(program / "bin"), "HOME": str(tmp_path)}
    assert "Usage: shipper" in run(program / "bin" / entry, arguments, env=environment).stdout
    said = run(program / "bin" / entry, "config", "examples", env=environment).stdout
    assert "container/Containerfile" in said


def test_all_examples_name_the_image_with_the_version():
    texts = [path.read_text() for path in (ROOT / "docs/install.md", *CONFIG.rglob("*")) if path.is_file()]
    tags = [tag for text in texts for tag in re.findall(r"\bshipper:([\d.]+\d)", text)]
    assert len(tags) > 8
    assert set(tags) == {__version__}


def test_without_the_extra_for_kafka_the_commands_say_how_to_install_it(shipper: Shipper, tmp_path: Path):
    (tmp_path / "confluent_kafka.py").write_text("raise ImportError\n")
    settings = {"input.kafka.brokers": ["127.0.0.1:9"], "input.kafka.topics": ["events"], "input.kafka.group_id": "g"}
    for command in (["run"], ["check", "--online"], ["status"], ["dead-letters", "list"]):
        ended = shipper.run(*command, settings=settings, env={"PYTHONPATH": str(tmp_path)}, check=False)
        assert ended.returncode == 2, ended
        said = ended.stdout + ended.stderr
        assert "needs confluent-kafka, which is not installed; run: " in said
        assert "Traceback" not in said
