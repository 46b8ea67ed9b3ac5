"""The metadata file that torch.distributed.checkpoint writes beside its shards."""

import pickle


def metadata_of(sizes: dict[str, int]) -> bytes:
    """Return the metadata as DCP writes it, for one tensor in each of these files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    return pickle.dumps(
        Metadata(
            {path: BytesStorageMetadata() for path in sizes},
            storage_data={
                MetadataIndex(path): _StorageInfo(path, 1, size - 1) for path, size in sizes.items()
            },
        )
    )
