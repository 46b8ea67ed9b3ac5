"""Google Cloud Storage, behind `stores.interface`: JSON API for objects, XML API for large ones. No retries here.

How a large object is sent was chosen among three:

- *XML API multipart uploads* (https://cloud.google.com/storage/docs/multipart-uploads): what is used. Parts go at the
  same time and in any order, can be listed, survive the process by their upload id, are no objects, and each is
  compared with a CRC32C (x-goog-hash, https://cloud.google.com/storage/docs/xml-api/put-object-multipart). After a
  crash at most the parts on their way are sent twice.
- *Resumable uploads* would send less twice, to 256 KiB, but one upload is one stream: parts cannot go at the same time.
- *Composed parts* are objects: where a bucket keeps what is deleted (soft delete, seven days by default; versions;
  retention), every byte would be stored and billed twice. 32 go into one, so a large shard takes a tree of requests.

What the XML API lacks: completing takes neither a condition nor a checksum of the whole. Hence `complete_multipart`
compares what the parts' checksums come to before it asks, and the CRC32C that the store found afterwards; an object
that has another is deleted (by its generation). No key of a shard is used twice, so a condition is not missed.
"""
