"""The images as places to run commands in: built, or an environment of the same packages.

buildah builds and runs them without a daemon; what it stores lies in one folder. An environment
stands where the image has its own, `/opt/planish`, in a container of another image.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.images import IMAGES

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = "planish/base:bookworm"
"""What `images/build.py --debian` makes."""

DEBIAN_COMPILER = "gcc python3-dev"
"""What `images/build.py --debian` gives as `PACKAGES`."""

ENVIRONMENT = "/opt/planish"
"""Where each image has its packages."""


def extras_and_pins(name: str) -> tuple[list[str], str]:
    """Return the extras that an image installs and the file of its pins."""
    text = (REPOSITORY / "images" / f"{name}.Dockerfile").read_text()
    (file,) = set(re.findall(r"(constraints[a-z-]*\.txt)", text))
    (extras,) = re.findall(r'"/build\[([a-z,]+)\]"', text)
    return extras.split(","), file


def debian_packages(name: str) -> str:
    """Return the command by which an image installs packages of Debian; "" where it has none."""
    text = (REPOSITORY / "images" / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    return "".join(re.findall(r"^RUN (apt-get .*)$", text, re.M))


@dataclass
class Containers:
    """One container of each image that was opened, in a folder of their own."""

    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    """Image -> container that buildah has made of it."""

    @property
    def settings(self) -> dict[str, str]:
        """Return the environment of buildah: it needs no daemon, no namespaces and no overlays."""
        path = self.folder / "storage.conf"
        (self.folder / "temporary").mkdir(parents=True, exist_ok=True)
        places = {"graphroot": self.folder / "storage", "runroot": self.folder / "run"}
        lines = ["[storage]", 'driver = "vfs"', *(f'{k} = "{v}"' for k, v in places.items())]
        path.write_text("\n".join(lines) + "\n")
        return {
            "CONTAINERS_STORAGE_CONF": str(path),
            "BUILDAH_ISOLATION": "chroot",
            "TMPDIR": str(self.folder / "temporary"),
        }

    def build(self, *words: str) -> None:
        """Build images with the tool that everybody uses."""
        line = [sys.executable, "images/build.py", "--with", "buildah", *words]
        subprocess.run(line, check=True, cwd=REPOSITORY, env={**os.environ, **self.settings})

    def has(self, reference: str) -> bool:
        """Tell whether an image is there."""
        return self._buildah("inspect", "--type", "image", reference, check=False).returncode == 0

    def open(self, name: str) -> None:
        """Make a container of an image; an environment stands in one of core."""
        is_built = not self.environment(name).exists()
        done = self._buildah("from", "--pull=never", IMAGES[name if is_built else "core"])
        self.names[name] = done.stdout.strip()
        if not is_built and (line := debian_packages(name)):
            words = ["--user", "0", self.names[name], "--", "sh", "-c", line]
            self._buildah("run", "--env", f"PACKAGES={DEBIAN_COMPILER}", *words)

    def environment(self, name: str) -> Path:
        """Return where the environment of an image is, or would be."""
        return self.folder / "environments" / name

    def install(self, name: str) -> None:
        """Install the extras of an image with its pins, for the Python of the base."""
        place = self.folder / "environments" / "unfinished"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        base = self._buildah("from", "--pull=never", BASE).stdout.strip()
        command = ["python3", "-m", "venv", "--without-pip", ENVIRONMENT]
        self._buildah("run", "--volume", f"{place}:{ENVIRONMENT}", base, "--", *command)
        self._buildah("rm", base)
        extras, pins = extras_and_pins(name)
        line = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python-version", "3.11"]
        line += ["--target", str(place / "lib/python3.11/site-packages"), "--constraint", pins]
        subprocess.run([*line, f".[{','.join(extras)}]"], check=True, cwd=REPOSITORY)
        place.rename(self.environment(name))

    def command(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        user: int | None = None,
    ) -> list[str]:
        """Return the command line that runs `words` in an image.

        Args:
            name: an image that was opened.
            words: program and arguments.
            environment: added to that of the image.
            mounts: path in the container -> folder of this machine.
            user: number of the user; None for the one that the image names.
        """
        # buildah would follow the link `/var/run` of the image on this machine.
        places = {re.sub("^/var/run/", "/run/", path): at for path, at in (mounts or {}).items()}
        volumes = [f"{folder}:{path}" for path, folder in places.items()]
        if self.environment(name).exists():
            volumes.append(f"{self.environment(name)}:{ENVIRONMENT}:ro")
        options = [word for volume in volumes for word in ("--volume", volume)]
        for variable, value in (environment or {}).items():
            options += ["--env", f"{variable}={value}"]
        if user is not None:
            options += ["--user", str(user)]
        return ["buildah", "run", *options, self.names[name], "--", *words]

    def run(self, name: str, *words: str, mounts: Mapping[str, Path] | None = None) -> str:
        """Run a command in an image and return what it printed; it must succeed."""
        line = self.command(name, words, mounts=mounts)
        done = subprocess.run(
            line, stdout=subprocess.PIPE, text=True, env={**os.environ, **self.settings}
        )
        sys.stdout.write(done.stdout)
        done.check_returncode()
        return done.stdout

    def close(self) -> None:
        """Remove the containers; images and environments stay."""
        for container in set(self.names.values()):
            self._buildah("rm", container, check=False)
        self.names.clear()

    def _buildah(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        settings = {**os.environ, **self.settings}
        done = subprocess.run(["buildah", *words], capture_output=True, text=True, env=settings)
        if check and done.returncode:
            raise RuntimeError(f"buildah {words[0]} must succeed, got {done.stderr.strip()}")
        return done


SECRETS = "/var/run/secrets/"
"""Where a pod sees what belongs to its account."""


@functools.cache
def can_mount() -> bool:
    """Tell whether this user may give a process a `/run` of its own."""
    line = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    return subprocess.run(line, stderr=subprocess.DEVNULL).returncode == 0


class Here:
    """Every image is the environment that the tests run in, with no other user.

    Of mounts there are those below `SECRETS` alone, where `can_mount()`.
    """

    settings: Mapping[str, str] = {}

    def command(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        user: int | None = None,
    ) -> list[str]:
        """Return the command line that runs `words` here."""
        variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        variables |= environment or {}
        line = ["env", *(f"{key}={value}" for key, value in variables.items())]
        secrets = [(path, at) for path, at in (mounts or {}).items() if path.startswith(SECRETS)]
        if not secrets or not can_mount():
            return [*line, *words]
        script = ["mount -t tmpfs tmpfs /run"]
        for path, at in secrets:
            place, source = shlex.quote(path), shlex.quote(str(at))
            script.append(f"mkdir -p {place} && mount --bind {source} {place}")
        script.append('exec "$@"')
        return [*line, "unshare", "--mount", "sh", "-c", " && ".join(script), "sh", *words]
