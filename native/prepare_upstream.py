"""Put the pinned llama.cpp, with our hooks applied, where CMake can build it.

CMake calls this at configure time; only the standard library is used. The steps are

    archive (cached) -> SHA-256 -> unpack into staging -> git apply -> sync into place

The sync copies a file only when its content differs, so that a changed hook rebuilds the
files it touches and nothing else. Staging is thrown away on any failure: either every hook is
in the tree or the tree is as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NATIVE = Path(__file__).resolve().parent
MARKER = "dspine"

# Parts of llama.cpp that no target of ours reads (vocabularies for its tests, documents,
# pictures): 120 MB that need not be written, compared and kept.
SKIPPED = frozenset({".git", ".github", ".devops", "models", "docs", "media", "benches", "skills"})

# Built by `make ui` inside the finished tree; the sync must not take it for a leftover.
KEPT = PurePosixPath("tools/ui/dist")


class PrepareError(Exception):
    """Something a person can act on; the message is all that is printed."""


@dataclass(frozen=True)
class Pin:
    """What native/pin.json says."""

    package: str
    version: str
    archive: str
    sha256: str
    vendored: str
    llama_cpp_commit: str

    @classmethod
    def read(cls, path: Path) -> Pin:
        """Read a pin file; unknown or missing keys are an error."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as exc:
            raise PrepareError(f"cannot read the pin {path}: {exc}") from exc

    def __str__(self) -> str:
        return f"{self.package} {self.version} (llama.cpp {self.llama_cpp_commit})"


def cache_dir() -> Path:
    """Folder for everything that outlives a checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspine"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; a second run waits instead of writing into the same tree."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# -- archive ----------------------------------------------------------------------------------


def pip_commands() -> list[list[str]]:
    """Ways to call the user's package client, best first."""
    # A build environment may hold a Python without pip, hence the fallbacks on PATH.
    found = [[sys.executable, "-m", "pip"]]
    found += [[path] for name in ("pip3", "pip") if (path := shutil.which(name))]
    return found


def download(pin: Pin, into: Path) -> Path:
    """Fetch the source distribution with pip and return its path."""
    wanted = ["download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wanted += ["--no-binary", pin.package, "--dest", str(into), f"{pin.package}=={pin.version}"]
    problems = []
    for pip in pip_commands():
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        archive = into / pin.archive
        if done.returncode == 0 and archive.is_file():
            return archive
        last = (done.stderr.strip() or f"no {pin.archive} came").splitlines()[-1]
        problems.append(f"  {' '.join(pip)}: {last}")
    raise PrepareError(f"cannot download the pin {pin}:\n" + "\n".join(problems))


def fetch(pin: Pin, cache: Path) -> Path:
    """Return the archive from the cache, downloading it when absent or damaged."""
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / pin.archive
    with locked(cache / f"{pin.archive}.lock"):
        if archive.is_file() and sha256_of(archive) == pin.sha256:
            return archive
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = download(pin, Path(folder))
            found = sha256_of(fresh)
            if found != pin.sha256:
                raise PrepareError(
                    f"the archive of the pin {pin} is not the expected one:\n"
                    f"  expected SHA-256 {pin.sha256}\n  found    SHA-256 {found}"
                )
            fresh.replace(archive)
    return archive


# -- staging ----------------------------------------------------------------------------------


def safe_relative(name: str, pin: Pin) -> PurePosixPath:
    """Return an archive member's path, refusing one that would leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise PrepareError(f"the archive of the pin {pin} has an unsafe member: {name}")
    return path


def unpack(archive: Path, pin: Pin, staging: Path) -> None:
    """Write the vendored llama.cpp of the archive, and nothing else, into staging."""
    prefix = (pin.archive.removesuffix(".tar.gz"), *PurePosixPath(pin.vendored).parts)
    count = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = safe_relative(member.name, pin).parts
            rest = parts[len(prefix) :]
            if parts[: len(prefix)] != prefix or not rest or rest[0] in SKIPPED or member.isdir():
                continue
            if not member.isfile():
                raise PrepareError(
                    f"the archive of the pin {pin} has a member that is no file: {member.name}"
                )
            write_member(tar, member, staging.joinpath(*rest))
            count += 1
    if not count:
        raise PrepareError(f"the archive of the pin {pin} holds no {pin.vendored}")


def write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(member)
    if source is None:
        raise PrepareError(f"cannot read {member.name} from the archive")
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("wb") as stream:
        shutil.copyfileobj(source, stream, 1 << 20)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)


def copy_checkout(checkout: Path, staging: Path) -> None:
    """Use a local llama.cpp checkout; it is copied, never changed."""
    if not (checkout / "ggml" / "CMakeLists.txt").is_file():
        raise PrepareError(f"DSPINE_LLAMA_CPP_DIR={checkout} is no llama.cpp checkout")

    def skipped(folder: str, names: list[str]) -> set[str]:
        top = Path(folder) == checkout
        return {name for name in names if top and (name in SKIPPED or name.startswith("build"))}

    shutil.copytree(checkout, staging, ignore=skipped, symlinks=False, dirs_exist_ok=True)


# -- hooks ------------------------------------------------------------------------------------


def hook_patches(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.patch"))


def touched_files(patch: Path) -> list[str]:
    """Paths that a patch writes, from its `+++ b/...` lines."""
    text = patch.read_text(encoding="utf-8")
    return re.findall(r"^\+\+\+ b/([^\t\n]+)", text, flags=re.MULTILINE)


def git_environment(staging: Path) -> dict[str, str]:
    # Inside some other repository `git apply` takes paths as that repository's, skips them
    # all and still exits 0. The ceiling and the cleared variables keep it from finding one.
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(staging.resolve().parent)
    return env


def apply_hook(patch: Path, staging: Path, source: str) -> None:
    """Apply one patch without fuzz and make sure that it really did something."""
    files = touched_files(patch)
    if not files:
        raise PrepareError(f"{patch.name} touches no file")
    command = ["git", "apply", "--whitespace=nowarn", str(patch.resolve())]
    try:
        done = subprocess.run(
            command,
            cwd=staging,
            env=git_environment(staging),
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as exc:
        raise PrepareError("git is needed to apply the hooks and was not found") from exc
    if done.returncode:
        raise PrepareError(f"{patch.name} does not apply to {source}:\n{done.stderr.rstrip()}")
    for name in files:
        path = staging / name
        if not path.is_file() or MARKER not in path.read_text(encoding="utf-8").lower():
            raise PrepareError(
                f"{patch.name} left no '{MARKER}' in {name}: it was not applied to {source}"
            )


# -- sync -------------------------------------------------------------------------------------


def files_below(root: Path) -> set[PurePosixPath]:
    return {
        PurePosixPath(path.relative_to(root).as_posix())
        for path in root.rglob("*")
        if path.is_file() or path.is_symlink()
    }


def sync(staging: Path, final: Path) -> tuple[int, int]:
    """Make `final` equal to `staging`; return how many files were written and deleted."""
    wanted = files_below(staging)
    written = 0
    for name in sorted(wanted):
        source, target = staging / name, final / name
        if target.is_file() and filecmp.cmp(source, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: a new modification time, and never half a file.
        source.replace(target)
        target.touch()
        written += 1
    gone = [name for name in files_below(final) - wanted if KEPT not in name.parents]
    for name in gone:
        (final / name).unlink()
    for folder in sorted((p for p in final.rglob("*") if p.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return written, len(gone)


# -- all of it --------------------------------------------------------------------------------


def fingerprint(pin_file: Path, hooks: Path) -> str:
    """Hash of everything that decides the finished tree."""
    digest = hashlib.sha256()
    for path in [pin_file, *hook_patches(hooks), Path(__file__)]:
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def fill_staging(pin: Pin, hooks: Path, cache: Path, checkout: Path | None, staging: Path) -> str:
    """Put upstream with every hook into staging; return what it was made from."""
    if checkout:
        source = f"the checkout {checkout}"
        copy_checkout(checkout, staging)
    else:
        source = f"the pin {pin}"
        unpack(fetch(pin, cache), pin, staging)
    for patch in hook_patches(hooks):
        apply_hook(patch, staging, source)
    return source


def prepare(
    build_dir: Path,
    *,
    pin_file: Path = NATIVE / "pin.json",
    hooks: Path = NATIVE / "hooks",
    cache: Path | None = None,
    checkout: Path | None = None,
) -> str:
    """Bring `build_dir/llama.cpp` up to date and return one line about it."""
    pin = Pin.read(pin_file)
    final, stamp = build_dir / "llama.cpp", build_dir / "llama.cpp.stamp"
    wanted = fingerprint(pin_file, hooks)
    build_dir.mkdir(parents=True, exist_ok=True)
    with locked(build_dir / "llama.cpp.lock"):
        # A local checkout can change at any time, so it is compared anew each time.
        current = not checkout and (final / "CMakeLists.txt").is_file() and stamp.is_file()
        if current and stamp.read_text(encoding="utf-8") == wanted:
            return f"{pin}: up to date"
        with tempfile.TemporaryDirectory(dir=build_dir, prefix="staging-") as folder:
            staging = Path(folder) / "llama.cpp"
            staging.mkdir()
            source = fill_staging(pin, hooks, cache or cache_dir() / "dl", checkout, staging)
            stamp.unlink(missing_ok=True)
            written, deleted = sync(staging, final)
        if not checkout:
            stamp.write_text(wanted, encoding="utf-8")
    hook_count = len(hook_patches(hooks))
    return f"{source}, {hook_count} hooks: {written} files written, {deleted} deleted"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build-dir", type=Path, help="where llama.cpp/ is put")
    parser.add_argument("--cache", type=Path, help="where the archive is kept")
    parser.add_argument("--pin", type=Path, default=NATIVE / "pin.json")
    parser.add_argument("--hooks", type=Path, default=NATIVE / "hooks")
    parser.add_argument(
        "--fetch-only", action="store_true", help="only fetch the archive and print its path"
    )
    args = parser.parse_args(argv)
    if not args.fetch_only and not args.build_dir:
        parser.error("--build-dir is required")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    local = os.environ.get("DSPINE_LLAMA_CPP_DIR")
    try:
        if args.fetch_only:
            line = str(fetch(Pin.read(args.pin), args.cache or cache_dir() / "dl"))
        else:
            line = prepare(
                args.build_dir.resolve(),
                pin_file=args.pin,
                hooks=args.hooks,
                cache=args.cache,
                checkout=Path(local).resolve() if local else None,
            )
    except PrepareError as exc:
        sys.stderr.write(f"prepare_upstream: {exc}\n")
        return 1
    sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
