"""Errors in a MovieLens folder name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from testproject.movielens.folder import FolderError, check, read_movies, read_tags

GOOD = {
    "movies": 'movieId,title,genres\r\n1,"Misérables, Les (1995)",Drama\r\n2,"A ""b""",War\r\n',
    "ratings": "userId,movieId,rating,timestamp\r\n7,1,4.0,964982703\r\n7,2,0.5,964982703\r\n",
    "tags": "userId,movieId,tag,timestamp\r\n7,2,will ferrell,1445714992\r\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in GOOD.items():
        (tmp_path / f"{name}.csv").write_bytes(text.encode())
    return tmp_path


def test_good_folder(folder: Path) -> None:
    contents = check(folder)
    assert contents.rows == {"movies": 2, "ratings": 2, "tags": 1}
    assert (contents.raters, contents.taggers) == ({7}, {7})
    assert [row.title for row in read_movies(folder)] == ["Misérables, Les (1995)", 'A "b"']
    assert [row.text for row in read_tags(folder)] == ["will ferrell"]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("ratings", "7,3,4.0,964982703", "ratings.csv: the movie 3 is not in movies.csv"),
        ("tags", "7,3,x,964982703", "tags.csv: the movie 3 is not in movies.csv"),
        ("ratings", "7,1,4.0,964982703", "ratings.csv: user 7 rates the movie 1 twice"),
        ("movies", "1,x,y", "movies.csv: the movie 1 is there twice"),
        ("ratings", "7,1,4.0", "ratings.csv, line 4: 3 fields instead of 4"),
        ("ratings", "7,1,4.0,1,1", "ratings.csv, line 4: 5 fields instead of 4"),
        ("ratings", "", "ratings.csv, line 4: 0 fields instead of 4"),
        ("ratings", "x,1,4.0,1", "ratings.csv, line 4: userId 'x' is no positive"),
        ("ratings", "1_0,1,4.0,1", "ratings.csv, line 4: userId '1_0' is no positive"),
        ("ratings", "-1,1,4.0,1", "ratings.csv, line 4: userId '-1' is no positive"),
        ("ratings", f"{2**63},1,4.0,1", "is no positive 64-bit number"),
        ("ratings", "7,0,4.0,1", "ratings.csv, line 4: movieId '0' is no positive"),
        ("ratings", "7,1,5.5,1", "ratings.csv, line 4: rating '5.5' is not"),
        ("ratings", "7,1,4.2,1", "rating '4.2' is not"),
        ("ratings", "7,1,nan,1", "rating 'nan' is not"),
        ("ratings", "7,1,,1", "rating '' is not"),
        ("ratings", "7,1,4.0,soon", "timestamp 'soon' is not in seconds"),
        ("ratings", "7,1,4.0,99999999999999999", "is not in seconds"),
        ("tags", "7,1,,1", "tags.csv, line 3: tag must have 1 to 255 characters, not 0"),
        ("tags", f"7,1,{'x' * 256},1", "tag must have 1 to 255 characters, not 256"),
        ("movies", '3,"x,y', "movies.csv, line 4: unexpected end of data"),
    ],
)
def test_bad_line(folder: Path, name: str, line: str, message: str) -> None:
    file = folder / f"{name}.csv"
    ending = "" if name == "movies" else "\r\n"
    file.write_bytes(file.read_bytes() + f"{line}{ending}".encode())
    with pytest.raises(FolderError) as caught:
        check(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the columns must be"),
        (b"a,b\r\n", "not a,b"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_file(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / f"{name}.csv").write_bytes(content)
    with pytest.raises(FolderError, match=message) as caught:
        check(folder)
    assert f"{name}.csv" in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_missing_file(folder: Path, name: str) -> None:
    (folder / f"{name}.csv").unlink()
    with pytest.raises(FolderError, match=f"{name}.csv is missing"):
        check(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="there is no folder"):
        check(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="there is no folder"):
        check(tmp_path / "file")
