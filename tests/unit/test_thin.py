"""Libraries with GPU code for one architecture load as before, and only code of other architectures is
gone.
"""

import base64
import ctypes
import hashlib
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from on_gpu import thin

CPP = shutil.which("c++")
MACHINE_CODE, PTX = 2, 1


def entry(architecture: int, payload: bytes, kind: int = MACHINE_CODE) -> bytes:
    """Return an entry as the CUDA compiler writes it: a header of 64 bytes, and the code."""
    header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 1, 8, architecture)
    return header.ljust(64, b"\0") + payload


def container(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(b"".join(entries))) + b"".join(entries)


def library(folder: Path, section: bytes) -> Path:
    """A shared library with a function, and a section of GPU code."""
    (folder / "code.bin").write_bytes(section)
    source = 'extern "C" int answer() { return 42; }\n'
    source += (
        f'__asm__(".section .nv_fatbin,\\"a\\"\\n.align 8\\n.incbin \\"{folder}/code.bin\\"\\n.text");\n'
    )
    (folder / "library.cpp").write_text(source)
    subprocess.run([CPP, "-shared", "-fPIC", folder / "library.cpp", "-o", folder / "library.so"], check=True)
    return folder / "library.so"


CONTAINERS = {
    "several": [container(entry(80, b"eighty  "), entry(90, b"ninety  "), entry(100, b"hundred "))],
    "PTX of the newest": [container(entry(90, b"ninety  "), entry(120, b"ptx of 120      ", PTX))],
    "machine code and PTX of the one": [
        container(entry(90, b"ptx     ", PTX), entry(90, b"sass    "), entry(75, b"old     "))
    ],
    "aligned containers": [
        container(entry(75, b"x" * 8), entry(90, b"y" * 40)),
        b"\0" * 24,
        container(entry(90, b"z" * 8)),
    ],
    "the one is missing": [
        container(entry(80, b"eighty  "), entry(80, b"its PTX ", PTX)),
        container(entry(80, b"a" * 8), entry(90, b"b" * 8)),
    ],
    "nothing": [b""],
}


@pytest.mark.skipif(CPP is None, reason="needs a C++ compiler (c++)")
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_thinned_library_loads_and_has_the_code_of_its_architecture(tmp_path, name):
    path = library(tmp_path, b"".join(CONTAINERS[name]))
    before = path.read_bytes()
    after, removed = thin.thinned(before, 90)
    start, end = thin.sections(before).get(".nv_fatbin", (0, 0))
    assert (before[:start], before[end:], len(before)) == (after[:start], after[end:], len(after))
    for old in thin.containers(before, start, end):
        kept = 90 not in {one.architecture for one in old}
        for one in old:
            payload = before[one.start : one.end]
            assert after[one.start : one.end] == (
                payload if kept or one.architecture == 90 else bytes(len(payload))
            )
    # The headers, which the CUDA runtime chooses by, are as they were.
    assert list(thin.containers(after, start, end)) == list(thin.containers(before, start, end))
    assert 90 not in removed
    (tmp_path / "thinned.so").write_bytes(after)
    assert ctypes.CDLL(str(tmp_path / "thinned.so")).answer() == 42


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (b"\x01\x02\x03\x04" * 8, "no container of GPU code"),
        (container(entry(90, b"ninety  "))[:-4] + b"\xff" * 20, "no container of GPU code"),
        (
            struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + entry(90, b"x" * 800)[:64],
            "ends after its container",
        ),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + bytes(64), "ends after its container"),
    ],
)
def test_a_section_of_another_format_is_refused(section, says):
    with pytest.raises(ValueError, match=says):
        list(thin.containers(section, 0, len(section)))


@pytest.mark.parametrize(
    "content", [b"", b"MZ" + bytes(80), b"\x7fELF\x01\x01" + bytes(80), b"!<arch>\n" + bytes(80)]
)
def test_a_file_that_is_no_library_is_refused(content):
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        thin.thinned(content, 90)


def test_a_rewritten_wheel_has_a_sound_record(tmp_path):
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "one/a.py",
            "one/big.so",
            "one/code.so",
            "one-1.0.dist-info/METADATA",
            "one-1.0.dist-info/RECORD",
        ):
            archive.writestr(name, f"{name} as it was")
    targets = [tmp_path / name for name in ("first.whl", "second.whl")]
    for target in targets:
        thin.rewrite_wheel(
            wheel,
            target,
            lambda name: name != "one/big.so",
            lambda name, content: b"less" if name == "one/code.so" else content,
        )
    assert targets[0].read_bytes() == targets[1].read_bytes()
    with zipfile.ZipFile(targets[0]) as archive:
        assert archive.read("one/code.so") == b"less"
        assert archive.read("one/a.py") == b"one/a.py as it was"
        rows = [line.split(",") for line in archive.read("one-1.0.dist-info/RECORD").decode().splitlines()]
        assert [name for name, *_ in rows] == archive.namelist()
        assert "one/big.so" not in archive.namelist()
        for name, digest, size in rows[:-1]:
            expected = (
                base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            )
            assert (digest, int(size)) == (f"sha256={expected}", len(archive.read(name)))
