"""What a stopped or running MinIO server has on its disk, read past its API."""

from pathlib import Path


def objects(data: Path, bucket: str) -> list[str]:
    """Return the keys of all objects of a bucket, ascending."""
    root = data / bucket
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("xl.meta"))


def open_uploads(data: Path) -> list[str]:
    """Return the folders of all uploads in parts that are neither completed nor aborted."""
    root = data / ".minio.sys" / "multipart"
    return sorted(str(path.parent.relative_to(root)) for path in root.glob("*/*/xl.meta"))
