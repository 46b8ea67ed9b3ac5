"""Google Cloud Storage, behind `stores.interface`: JSON API for objects, XML API for large ones. No retries here.

There are three ways to send a large object:

- *XML API multipart uploads* (https://cloud.google.com/storage/docs/multipart-uploads) are what this package uses.
  Parts can be sent concurrently and in any order, can be listed, survive the process by their upload id, and are not
  objects; each is compared with a CRC32C (x-goog-hash,
  https://cloud.google.com/storage/docs/xml-api/put-object-multipart). After a crash, at most the parts in transit are
  sent twice.
- *Resumable uploads* would send less twice (up to 256 KiB), but one upload is one stream: no concurrent parts.
- *Composed parts* are objects: if a bucket keeps what is deleted (soft delete, seven days by default; versions;
  retention), every byte would be stored and billed twice. At most 32 can be composed into one, so a large shard takes
  a tree of requests.

The XML API's request to complete an upload takes neither a condition nor a checksum of the whole. So
`complete_multipart` compares the combined checksums of the parts before it asks, and afterwards the CRC32C that the
store has computed; if that differs, the object is deleted (by its generation). A condition is not missed, because no
key of a shard is used twice.
"""
