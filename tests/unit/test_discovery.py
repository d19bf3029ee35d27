"""Which files a pattern finds."""

from pathlib import Path

from shipper.sources.discovery import Patterns
from shipper.sources.siblings import Siblings
from tests.cases import each


@each("name", ["*.log", "app-[0-9].log", "app-?.log", "[ab]pp-1.log"])
def test_a_file_named_like_a_pattern_does_not_hide_the_files_that_the_pattern_matches(
    tmp_path: Path, name: str
) -> None:
    """As the shell creates one for `> *.log` where no file matches yet."""
    folder = tmp_path / name.encode().hex()
    folder.mkdir()
    for existing in (name, "app-1.log"):
        (folder / existing).touch()

    assert _found(folder, name) == {name, "app-1.log"}


def test_a_folder_named_like_a_pattern_does_not_hide_the_files_that_the_pattern_matches(tmp_path: Path) -> None:
    (tmp_path / "*").mkdir()
    for name in ("*/below.log", "app.log"):
        (tmp_path / name).touch()

    assert _found(tmp_path, "*") == {"*/below.log", "app.log"}


def test_files_and_folders_with_brackets_in_their_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "exports [1]").mkdir()
    for name in ("exports [1]/app.log", "app [1].log"):
        (tmp_path / name).touch()

    assert _found(tmp_path, "exports [1]") == {"exports [1]/app.log"}
    assert _found(tmp_path, "app [1].log") == {"app [1].log"}


@each(
    ("pattern", "found"),
    [
        ("x.log", ["x.log"]),
        ("*.log", ["x.log"]),
        ("x[2].txt", ["x[2].txt"]),
        ("sub", ["sub/y.log"]),
        ("**/*.log", ["sub/y.log", "x.log"]),
        ("later.log", []),
    ],
)
def test_a_relative_pattern_means_files_of_the_current_folder_whatever_its_name(
    tmp_path: Path, pattern: str, found: list[str]
) -> None:
    folder = tmp_path / "a[1]*b"
    for name in ("x.log", "x.log.1", "sub/y.log", "x[2].txt", "../a1b/x.log", "../a1b/later.log"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n")
    patterns = Patterns([pattern], state_directory=folder / "state", folder=str(folder))
    names = [match.name for match in patterns.find()]
    assert names == [str(folder / name) for name in found]
    assert found or str(folder / pattern) in patterns.unmatched()[patterns.include[0]]
    assert patterns.watched_folders().folders[0] == (folder / "sub" if pattern == "sub" else folder)
    generations, _ = Siblings(patterns).find(names, dict.fromkeys(patterns.include, 0.0), 1e10)
    assert [file.name for file in generations] == ([f"{folder}/x.log.1"] if "x.log" in found else [])


def _found(folder: Path, pattern: str) -> set[str]:
    patterns = Patterns([str(folder / pattern)], state_directory=folder / "state")
    return {str(found.path.relative_to(folder)) for found in patterns.find()}
