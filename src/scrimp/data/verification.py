"""`scrimp verify`: check every byte and figure of a folder of token shards, and name what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scrimp.data.corpus import check_entry, check_tokenizer
from scrimp.data.corpus_manifest import AGAIN, MANIFEST, SPLITS, TOKENIZER, read_manifest
from scrimp.data.progress_line import Progress, note
from scrimp.errors import DataError


@dataclass(frozen=True)
class Damage:
    """One file that must not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    folder: Path
    num_shards: int
    num_bytes: int
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damaged

    def __str__(self) -> str:
        head = f"{self.folder}: {self.num_shards} shards, {self.num_bytes:,} bytes"
        if self.ok:
            return f"{head}, every checksum matches"
        lines = [f"  {damage.name}: {damage.reason}" for damage in self.damaged]
        advice = (
            "run `scrimp prepare` again with the same source and folder: it rewrites what is damaged only"
        )
        if any(damage.reason.startswith("altered") for damage in self.damaged):
            advice = AGAIN
        return "\n".join([f"{head}, {len(self.damaged)} damaged", *lines, advice])


def verify(folder: Path, *, progress: bool = True) -> VerifyReport:
    """Check every shard, the tokenizer and every figure of a corpus against their checksums."""
    manifest = read_manifest(folder, check=False)
    found: list[Damage] = []
    if manifest.is_altered:
        found.append(Damage(MANIFEST, "altered: its figures do not match its digest"))
    if not manifest.complete:
        found.append(Damage(MANIFEST, "not complete: the preparation was interrupted"))
    entries = [entry for name in SPLITS for entry in manifest.splits.get(name, [])]
    size, done = sum(entry.file_bytes for entry in entries), 0
    with Progress(f"verifying {folder}", size, enabled=progress) as bar:
        for entry in entries:
            try:
                check_entry(folder, entry, whole=True)
            except DataError as error:
                found.append(Damage(entry.name, _reason(error)))
                note(f"{entry.name}: {_reason(error)}", enabled=progress)
            done += entry.file_bytes
            bar.update(done)
    if manifest.complete or manifest.tokenizer.digest is not None:
        try:
            check_tokenizer(folder, manifest)
        except DataError as error:
            found.append(Damage(TOKENIZER, _reason(error)))
    return VerifyReport(folder, len(entries), size, tuple(found))


def _reason(error: DataError) -> str:
    parts = [f"got {error.got}" if error.got else "", f"expected {error.expected}" if error.expected else ""]
    return ", ".join(part for part in parts if part) or error.what
