/* sink: an honest S3 stand-in for measuring clients, on 127.0.0.1.
 *
 *   cc -O2 -pthread -o sink sink.c && ./sink PORT [verify] [keep=MIB] [delay=MS] [rate=KIB] [total=KIB] [slow=N]
 *                                            [limit=N] [log=FILE] [stdin]
 *   cc -O2 -pthread -DTLS -o sink sink.c -lssl -lcrypto && ./sink PORT tls=PEM …
 *
 * It reads every byte of a body before it answers, and one thread serves one connection. A body of up to 4 MiB is
 * kept, and its CRC64NVME or CRC32C is compared with the header, or with the trailer that `x-amz-trailer` has promised.
 * Frames must add up to the lengths that are told. A larger body is counted and thrown away:
 * the object's size, ETag and the checksum *it was told* stay, and a GET answers zeros. With `verify` large bodies are
 * checked too, part by part and as a whole, which costs the sink CPU. With `keep` larger bodies are kept as well, and
 * GETs answer with them, until as many MiB as it says have been taken (what is deleted gives no room back); then they
 * are only counted again. Nothing is authenticated.
 *
 * Understood, path-style only: PutObject with If-None-Match: * and If-Match, GetObject with Range, HeadObject,
 * DeleteObject(s), ListObjectsV2, CreateMultipartUpload, UploadPart, ListParts, CompleteMultipartUpload,
 * AbortMultipartUpload, ListMultipartUploads, HeadBucket, Expect: 100-continue, chunked and aws-chunked bodies
 * and the one inside the other.
 * GET /__stats answers "bytes_in bytes_out requests connections": bytes of objects and parts, without framing, and
 * requests, since the start; the most connections that were open at once since the last such question.
 * `delay` sleeps before every answer, as a far store would; `log` gets a line for every request: method and target.
 * A link: `rate` is what one connection moves, `total` what all move together, in KiB/s each way; of N connections
 * one is `slow` and moves a tenth of its rate; beyond `limit` requests a second the answer is 503 SlowDown.
 * `tls` speaks TLS only, with certificate and key from one file, and AES-128-GCM with everybody: left to the clients,
 * OpenSSL's would take AES-256 and pay for it. `stdin` ends it when its standard input does: with whoever started it,
 * however that ended. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef TLS
#include <openssl/ssl.h>
static SSL_CTX *tls;
#endif

#define BUF (1 << 20)
#define KEEP (4 << 20)
static atomic_llong bytes_in, bytes_out, requests;
static atomic_int num_open, most_open;
static atomic_llong room; /* for large bodies */
static int verify_large, keeps_large, delay_ms, ends_with_stdin, slow_every, limit_per_s;
static double rate, total; /* bytes/s; 0: none */
static FILE *log_file;
static char *zeros;

/* --- checksums: both are reflected CRCs, so one table-driven form and one way to combine serve both -------------- */

enum { NONE, CRC64NVME, CRC32C };
static const uint64_t POLY[] = {0, 0x9a6c9329ac4bc9b5ull, 0x82f63b78ull};
static const int WIDTH[] = {0, 64, 32};
static uint64_t table[3][8][256];

static void make_tables(void) {
    for (int a = CRC64NVME; a <= CRC32C; a++)
        for (int i = 0; i < 256; i++) {
            uint64_t r = i;
            for (int k = 0; k < 8; k++) r = (r >> 1) ^ (r & 1 ? POLY[a] : 0);
            table[a][0][i] = r;
        }
    for (int a = CRC64NVME; a <= CRC32C; a++)
        for (int s = 1; s < 8; s++)
            for (int i = 0; i < 256; i++) table[a][s][i] = (table[a][s - 1][i] >> 8) ^ table[a][0][table[a][s - 1][i] & 255];
}
static uint64_t mask(int a) { return WIDTH[a] == 64 ? ~0ull : 0xffffffffull; }
static uint64_t crc(int a, uint64_t r, const char *p, size_t n) {
    r ^= mask(a);
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w; memcpy(&w, p, 8); r ^= w;
        r = table[a][7][r & 255] ^ table[a][6][r >> 8 & 255] ^ table[a][5][r >> 16 & 255] ^ table[a][4][r >> 24 & 255] ^
            table[a][3][r >> 32 & 255] ^ table[a][2][r >> 40 & 255] ^ table[a][1][r >> 48 & 255] ^ table[a][0][r >> 56];
    }
    for (; n; p++, n--) r = (r >> 8) ^ table[a][0][(r ^ (uint8_t)*p) & 255];
    return r ^ mask(a);
}
static uint64_t times(const uint64_t *m, uint64_t v) {
    uint64_t s = 0;
    for (; v; v >>= 1, m++) if (v & 1) s ^= *m;
    return s;
}
/* As zlib's crc32_combine: the first CRC is pushed through n zero bytes by repeated squaring of the shift operator. */
static uint64_t combine(int a, uint64_t first, uint64_t second, uint64_t n) {
    uint64_t even[64], odd[64], *from = odd, *to = even;
    odd[0] = POLY[a];
    for (int i = 1; i < WIDTH[a]; i++) odd[i] = 1ull << (i - 1);
    for (int i = 0; i < 2; i++) { for (int k = 0; k < WIDTH[a]; k++) to[k] = times(from, from[k]); uint64_t *t = from; from = to; to = t; }
    for (; n; n >>= 1) { /* the operator for 1 byte, 2, 4, … */
        for (int k = 0; k < WIDTH[a]; k++) to[k] = times(from, from[k]);
        uint64_t *t = from; from = to; to = t;
        if (n & 1) first = times(from, first);
    }
    return first ^ second;
}
static void base64(int a, uint64_t value, char *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    int n = WIDTH[a] / 8; uint8_t b[9] = {0};
    for (int i = 0; i < n; i++) b[i] = value >> (8 * (n - 1 - i));
    for (int i = 0; i < n; i += 3) {
        uint32_t w = b[i] << 16 | (i + 1 < n ? b[i + 1] << 8 : 0) | (i + 2 < n ? b[i + 2] : 0);
        for (int k = 0; k < 4; k++) *out++ = i + k <= n ? digits[w >> (18 - 6 * k) & 63] : '=';
    }
    *out = 0;
}

/* --- text ---------------------------------------------------------------------------------------------------- */

struct text { char *p; size_t n, cap; };
static void add(struct text *t, const char *format, ...) {
    for (;;) {
        va_list args; va_start(args, format);
        int n = vsnprintf(t->p + t->n, t->cap - t->n, format, args);
        va_end(args);
        if (t->n + n < t->cap) { t->n += n; return; }
        t->cap = (t->cap + n + 1) * 2; t->p = realloc(t->p, t->cap);
    }
}
static void add_xml(struct text *t, const char *s) {
    for (; *s; s++)
        if (*s == '&') add(t, "&amp;"); else if (*s == '<') add(t, "&lt;"); else if (*s == '>') add(t, "&gt;"); else add(t, "%c", *s);
}
static void unescape(char *s) { /* XML, in place */
    static const struct { const char *from; char to; } names[] = {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
    char *to = s;
    while (*s) {
        size_t i = 0;
        while (i < 5 && strncmp(s, names[i].from, strlen(names[i].from))) i++;
        if (i < 5) { *to++ = names[i].to; s += strlen(names[i].from); } else *to++ = *s++;
    }
    *to = 0;
}
static void decode(char *s) { /* %XX, in place */
    char *to = s; unsigned x;
    while (*s) { if (*s == '%' && sscanf(s + 1, "%2x", &x) == 1) { *to++ = x; s += 3; } else *to++ = *s++; }
    *to = 0;
}
/* The value of a query parameter, decoded, or NULL if there is none. */
static char *parameter(const char *query, const char *name, char *out, size_t size) {
    size_t n = strlen(name);
    for (const char *p = query; p && *p; p = strchr(p, '&') ? strchr(p, '&') + 1 : NULL)
        if (!strncmp(p, name, n) && (p[n] == '=' || p[n] == '&' || !p[n])) {
            const char *v = p[n] == '=' ? p + n + 1 : p + n;
            snprintf(out, size, "%.*s", (int)strcspn(v, "&"), v);
            decode(out);
            return out;
        }
    return NULL;
}
static void date(char *out, time_t at, int is_iso) {
    struct tm tm; gmtime_r(&at, &tm);
    strftime(out, 40, is_iso ? "%Y-%m-%dT%H:%M:%S.000Z" : "%a, %d %b %Y %H:%M:%S GMT", &tm);
}

/* --- what is stored: sorted by key, behind one lock ------------------------------------------------------------- */

struct sum { char name[16], value[64]; }; /* "crc64nvme", base64 */
struct object { char *key, *data; long long size; unsigned long long etag; struct sum sum; time_t at; int readers; };
struct part { long long size; unsigned long long etag; struct sum sum; int algorithm; uint64_t crc; char *data; };
struct upload { char *key; unsigned long long id; struct part *parts; int num_parts; time_t at; };
static struct object **objects; static size_t num_objects, cap_objects;
static struct upload **uploads; static size_t num_uploads, cap_uploads;
static unsigned long long serial;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t place(const char *key) { /* of the first object at or after key */
    size_t low = 0, high = num_objects;
    while (low < high) { size_t mid = (low + high) / 2; if (strcmp(objects[mid]->key, key) < 0) low = mid + 1; else high = mid; }
    return low;
}
static struct object *find(const char *key) {
    size_t i = place(key);
    return i < num_objects && !strcmp(objects[i]->key, key) ? objects[i] : NULL;
}
static void erase(const char *key) {
    struct object *o = find(key);
    if (!o) return;
    size_t i = place(key);
    memmove(objects + i, objects + i + 1, (--num_objects - i) * sizeof *objects);
    free(o->key); o->key = NULL;
    if (!o->readers) free(o->data), free(o); /* else the last reader does */
}
static struct object *store(const char *key, char *data, long long size, struct sum sum) { /* takes data */
    erase(key);
    if (num_objects == cap_objects) objects = realloc(objects, (cap_objects = cap_objects * 2 + 64) * sizeof *objects);
    size_t i = place(key);
    memmove(objects + i + 1, objects + i, (num_objects++ - i) * sizeof *objects);
    struct object *o = objects[i] = calloc(1, sizeof *o);
    *o = (struct object){strdup(key), data, size, ++serial, sum, time(NULL), 0};
    return o;
}
static struct upload *find_upload(const char *key, const char *id) {
    for (size_t i = 0; i < num_uploads; i++) if (uploads[i]->id == strtoull(id, NULL, 16) && !strcmp(uploads[i]->key, key)) return uploads[i];
    return NULL;
}
static void end_upload(struct upload *u) {
    size_t i = 0; while (uploads[i] != u) i++;
    uploads[i] = uploads[--num_uploads];
    for (int k = 0; k < u->num_parts; k++) free(u->parts[k].data);
    free(u->key); free(u->parts); free(u);
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

struct conn {
    int fd; size_t have, pos; char *buf; double rate, free_at[2]; /* [is_out] */
#ifdef TLS
    SSL *ssl;
#endif
};
struct frames { enum { SIZE, DATA, DATA_END, TRAILER, END, BROKEN } at; long long left; size_t n; char line[512]; };
struct body { long long size; char *data; int is_kept, algorithm; uint64_t crc; struct sum sum; struct frames *frames; };

static double now_s(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
/* So much at a time that a connection is served some 50 times a second: smoother would cost CPU, rougher the model. */
static size_t quantum(struct conn *c, size_t n) {
    double most = c->rate ? c->rate / 50 : total ? total / 500 : n;
    if (most < 4096) most = 4096;
    return most < n ? (size_t)most : n;
}
/* Bytes pass one after the other: each connection's own pipe, then the one that all share. */
static void pace(struct conn *c, size_t n, int is_out) {
    static double shared_free_at[2];
    static pthread_mutex_t shared = PTHREAD_MUTEX_INITIALIZER;
    double now = now_s(), until = now;
    if (c->rate) {
        if (c->free_at[is_out] < now - 0.02) c->free_at[is_out] = now;
        until = c->free_at[is_out] += n / c->rate;
    }
    if (total) {
        pthread_mutex_lock(&shared);
        if (shared_free_at[is_out] < now - 0.02) shared_free_at[is_out] = now;
        shared_free_at[is_out] += n / total;
        if (shared_free_at[is_out] > until) until = shared_free_at[is_out];
        pthread_mutex_unlock(&shared);
    }
    if (until > now) usleep((until - now) * 1e6);
}
static ssize_t receive(struct conn *c, char *p, size_t n) {
    n = quantum(c, n);
#ifdef TLS
    ssize_t got = c->ssl ? SSL_read(c->ssl, p, n) : recv(c->fd, p, n, 0);
#else
    ssize_t got = recv(c->fd, p, n, 0);
#endif
    if (got > 0) pace(c, got, 0);
    return got;
}
static int fill(struct conn *c) {
    if (c->pos == c->have) c->pos = c->have = 0;
    if (c->have == BUF) return -1;
    ssize_t n = receive(c, c->buf + c->have, BUF - c->have);
    if (n <= 0) return -1;
    c->have += n;
    return 0;
}
static char *line(struct conn *c) { /* one CRLF line, terminated in place */
    for (;;) {
        char *nl = c->have > c->pos ? memmem(c->buf + c->pos, c->have - c->pos, "\r\n", 2) : NULL;
        if (nl) { char *s = c->buf + c->pos; *nl = 0; c->pos = nl + 2 - c->buf; return s; }
        if (c->pos) { memmove(c->buf, c->buf + c->pos, c->have - c->pos); c->have -= c->pos; c->pos = 0; }
        if (fill(c)) return NULL;
    }
}
static void unframe(struct body *b, const char *p, size_t n);
static void take(struct body *b, const char *p, size_t n) {
    if (b->frames) { unframe(b, p, n); return; }
    if (b->is_kept && b->size + (long long)n > KEEP) {
        long long more = (b->size > KEEP ? 0 : b->size) + n;
        if (atomic_fetch_sub(&room, more) < more) atomic_fetch_add(&room, more), b->is_kept = 0, free(b->data), b->data = NULL;
    }
    if (b->is_kept) { b->data = realloc(b->data, b->size + n + 1); memcpy(b->data + b->size, p, n); b->data[b->size + n] = 0; }
    if (verify_large && b->algorithm) b->crc = crc(b->algorithm, b->crc, p, n);
    b->size += n;
}
static int read_plain(struct conn *c, long long n, struct body *b) {
    while (n > 0) {
        if (c->pos == c->have) {
            c->pos = c->have = 0;
            ssize_t r = receive(c, c->buf, n < BUF ? (size_t)n : BUF);
            if (r <= 0) return -1;
            take(b, c->buf, r); n -= r;
            continue;
        }
        long long m = (long long)(c->have - c->pos) < n ? (long long)(c->have - c->pos) : n;
        take(b, c->buf + c->pos, m); c->pos += m; n -= m;
    }
    return 0;
}
static void note_checksum(struct body *b, const char *s) { /* "x-amz-checksum-NAME: value", as header or trailer */
    char name[32], value[64];
    if (strncasecmp(s, "x-amz-checksum-", 15) || sscanf(s + 15, "%31[A-Za-z0-9]: %63s", name, value) != 2) return;
    for (char *p = name; *p; p++) if (*p >= 'A' && *p <= 'Z') *p += 32;
    if (strcmp(name, "crc64nvme") && strcmp(name, "crc32c") && strcmp(name, "crc32") && strcmp(name, "sha1") && strcmp(name, "sha256")) return;
    snprintf(b->sum.name, sizeof b->sum.name, "%.15s", name);
    snprintf(b->sum.value, sizeof b->sum.value, "%s", value);
    b->algorithm = !strcmp(name, "crc64nvme") ? CRC64NVME : !strcmp(name, "crc32c") ? CRC32C : NONE;
}
static void promise_checksum(struct body *b, const char *names) { /* in a trailer: its algorithm must be known while bytes are read */
    b->algorithm = strcasestr(names, "x-amz-checksum-crc64nvme") ? CRC64NVME : strcasestr(names, "x-amz-checksum-crc32c") ? CRC32C : NONE;
}
/* aws-chunked inside of HTTP's own chunks, as botocore sends it over TLS: cut anywhere. */
static void unframe(struct body *b, const char *p, size_t n) {
    struct frames *f = b->frames;
    b->frames = NULL; /* what is inside of the frames */
    while (n) {
        if (f->at == DATA) {
            size_t m = (long long)n < f->left ? n : (size_t)f->left;
            take(b, p, m);
            p += m; n -= m;
            if (!(f->left -= m)) f->at = DATA_END;
            continue;
        }
        if (f->at >= END || f->n + 1 == sizeof f->line) { f->at = BROKEN; break; }
        f->line[f->n++] = *p++; n--;
        if (f->n < 2 || f->line[f->n - 2] != '\r' || f->line[f->n - 1] != '\n') continue;
        f->line[f->n - 2] = 0; f->n = 0;
        if (f->at == SIZE) f->at = (f->left = strtoll(f->line, NULL, 16)) ? DATA : TRAILER;
        else if (f->at == DATA_END) f->at = SIZE;
        else if (*f->line) note_checksum(b, f->line);
        else f->at = END;
    }
    b->frames = f;
}
static int read_chunked(struct conn *c, struct body *b, long long *length) { /* HTTP's chunks and aws-chunked look the same */
    for (*length = 0;;) {
        char *s = line(c); if (!s) return -1;
        long long n = strtoll(s, NULL, 16);
        *length += strlen(s) + 2 + (n ? n + 2 : 0);
        if (n) { if (read_plain(c, n, b) || !(s = line(c)) || *s) return -1; continue; }
        while ((s = line(c)) && *s) note_checksum(b, s), *length += strlen(s) + 2;
        *length += 2;
        return s ? 0 : -1;
    }
}
static int is_right(struct body *b) {
    char text[16];
    int is_small = b->is_kept && b->size <= KEEP;
    if (!b->algorithm || !(is_small || verify_large)) return 1;
    base64(b->algorithm, is_small ? crc(b->algorithm, 0, b->data ? b->data : "", b->size) : b->crc, text);
    return !strcmp(text, b->sum.value);
}

/* --- answering --------------------------------------------------------------------------------------------------- */

static ssize_t transmit(struct conn *c, const char *p, size_t n) {
    n = quantum(c, n);
    pace(c, n, 1);
#ifdef TLS
    if (c->ssl) return SSL_write(c->ssl, p, n);
#endif
    return send(c->fd, p, n, MSG_NOSIGNAL);
}
static int put(struct conn *c, const char *p, long long n) {
    while (n > 0) { ssize_t w = transmit(c, p, n); if (w <= 0) return -1; p += w; n -= w; }
    return 0;
}
static int reply(struct conn *c, const char *status, const char *headers, const char *body, size_t n) {
    struct text t = {0}; char now[40]; date(now, time(NULL), 0);
    add(&t, "HTTP/1.1 %s\r\nDate: %s\r\nContent-Length: %zu\r\nx-amz-request-id: 1\r\n%s\r\n", status, now, n, headers);
    if (n) add(&t, "%.*s", (int)n, body);
    int bad = put(c, t.p, t.n);
    free(t.p);
    return bad;
}
static int fail(struct conn *c, const char *status, const char *code, int is_head) {
    char b[256]; int n = snprintf(b, sizeof b, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, code);
    return reply(c, status, "Content-Type: application/xml\r\n", b, is_head ? 0 : n);
}
static void add_sum_header(struct text *t, const struct sum *sum, int is_whole) {
    if (sum->name[0]) add(t, "x-amz-checksum-%s: %s\r\n%s", sum->name, sum->value, is_whole && !strchr(sum->value, '-') ? "x-amz-checksum-type: FULL_OBJECT\r\n" : "");
}
static void add_sum_xml(struct text *t, const struct sum *sum) {
    if (!sum->name[0]) return;
    char name[16]; int i = 0;
    for (; sum->name[i]; i++) name[i] = sum->name[i] >= 'a' && sum->name[i] <= 'z' ? sum->name[i] - 32 : sum->name[i];
    name[i] = 0;
    add(t, "<Checksum%s>%s</Checksum%s>", name, sum->value, name);
}

struct request { char method[16], path[4096], query[4096], if_match[128]; int if_none; long long from, to; };

static int get_object(struct conn *c, struct request *r, const char *key) {
    pthread_mutex_lock(&lock);
    struct object *o = find(key);
    if (!o) { pthread_mutex_unlock(&lock); return fail(c, "404 Not Found", "NoSuchKey", r->method[0] == 'H'); }
    long long size = o->size, from = r->from < 0 ? 0 : r->from, to = r->to < 0 || r->to >= size ? size - 1 : r->to, n = to - from + 1;
    const char *data = o->data && n > 0 && from < size ? o->data + from : NULL; char at[40], now[40]; struct text t = {0};
    o->readers++;
    date(at, o->at, 0); date(now, time(NULL), 0);
    int is_ranged = r->from >= 0;
    add(&t, "HTTP/1.1 %s\r\nDate: %s\r\nContent-Length: %lld\r\nETag: \"%032llx\"\r\nLast-Modified: %s\r\nAccept-Ranges: bytes\r\n", is_ranged ? "206 Partial Content" : "200 OK", now, n, o->etag, at);
    if (is_ranged) add(&t, "Content-Range: bytes %lld-%lld/%lld\r\n", from, to, size);
    else add_sum_header(&t, &o->sum, 1);
    add(&t, "\r\n");
    pthread_mutex_unlock(&lock);
    int bad = size && from >= size ? fail(c, "416 Range Not Satisfiable", "InvalidRange", 0) : put(c, t.p, t.n);
    if (size && from >= size) n = 0;
    if (!bad && r->method[0] == 'G') {
        for (long long sent = 0, m; sent < n && !bad; sent += m) {
            m = n - sent < BUF ? n - sent : BUF;
            if (!(bad = put(c, data ? data + sent : zeros, m))) atomic_fetch_add(&bytes_out, m);
        }
    }
    pthread_mutex_lock(&lock);
    if (!--o->readers && !o->key) free(o->data), free(o); /* deleted meanwhile */
    pthread_mutex_unlock(&lock);
    free(t.p);
    return bad;
}
static int put_object(struct conn *c, struct request *r, const char *key, struct body *b) {
    struct text t = {0};
    pthread_mutex_lock(&lock);
    struct object *there = find(key); char etag[40] = "";
    if (there) snprintf(etag, sizeof etag, "%032llx", there->etag);
    int is_unmet = (r->if_none && there) || (r->if_match[0] && !(there && strstr(r->if_match, etag))), is_absent = r->if_match[0] && !there;
    if (!is_unmet) {
        struct object *o = store(key, b->is_kept ? b->data : NULL, b->size, b->sum);
        if (b->is_kept) b->data = NULL;
        add(&t, "ETag: \"%032llx\"\r\n", o->etag);
        add_sum_header(&t, &o->sum, 1);
    }
    pthread_mutex_unlock(&lock);
    int bad = is_absent ? fail(c, "404 Not Found", "NoSuchKey", 0) : is_unmet ? fail(c, "412 Precondition Failed", "PreconditionFailed", 0) : reply(c, "200 OK", t.p, "", 0);
    free(t.p);
    return bad;
}
static int list_objects(struct conn *c, struct request *r, const char *bucket) {
    char value[2048], from[4096] = "", prefix[4096], at[40]; int max = 1000, n = 0, is_cut = 0;
    size_t skip = strlen(bucket) + 1;
    snprintf(prefix, sizeof prefix, "%s/%s", bucket, parameter(r->query, "prefix", value, sizeof value) ? value : "");
    if (parameter(r->query, "max-keys", value, sizeof value) && atoi(value) > 0 && atoi(value) < 1000) max = atoi(value);
    if (parameter(r->query, "continuation-token", value, sizeof value) || parameter(r->query, "start-after", value, sizeof value))
        snprintf(from, sizeof from, "%s/%s", bucket, value);
    struct text t = {0}, last = {0};
    add(&t, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>%s</Name><Prefix>", bucket);
    add_xml(&t, prefix + skip); add(&t, "</Prefix>");
    pthread_mutex_lock(&lock);
    for (size_t i = place(strcmp(from, prefix) > 0 ? from : prefix); i < num_objects; i++) {
        struct object *o = objects[i];
        if (strncmp(o->key, prefix, strlen(prefix))) break;
        if (!strcmp(o->key, from)) continue;
        if (n == max) { is_cut = 1; break; }
        n++;
        date(at, o->at, 1);
        add(&t, "<Contents><Key>"); add_xml(&t, o->key + skip);
        add(&t, "</Key><LastModified>%s</LastModified><ETag>\"%032llx\"</ETag><Size>%lld</Size><StorageClass>STANDARD</StorageClass></Contents>", at, o->etag, o->size);
        last.n = 0; add(&last, "%s", o->key + skip);
    }
    pthread_mutex_unlock(&lock);
    add(&t, "<KeyCount>%d</KeyCount><IsTruncated>%s</IsTruncated>", n, is_cut ? "true" : "false");
    if (is_cut) { add(&t, "<NextContinuationToken>"); add_xml(&t, last.p); add(&t, "</NextContinuationToken>"); }
    add(&t, "</ListBucketResult>");
    int bad = reply(c, "200 OK", "Content-Type: application/xml\r\n", t.p, t.n);
    free(t.p); free(last.p);
    return bad;
}
static int delete_objects(struct conn *c, const char *bucket, struct body *b) {
    struct text t = {0};
    add(&t, "<DeleteResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    pthread_mutex_lock(&lock);
    for (char *p = b->data; p && (p = strstr(p, "<Key>"));) {
        char *end = strstr(p += 5, "</Key>"), key[4096];
        if (!end) break;
        *end = 0; unescape(p);
        snprintf(key, sizeof key, "%s/%s", bucket, p);
        erase(key);
        add(&t, "<Deleted><Key>"); add_xml(&t, p); add(&t, "</Key></Deleted>");
        p = end + 1;
    }
    pthread_mutex_unlock(&lock);
    add(&t, "</DeleteResult>");
    int bad = reply(c, "200 OK", "Content-Type: application/xml\r\n", t.p, t.n);
    free(t.p);
    return bad;
}
static int list_uploads(struct conn *c, struct request *r, const char *bucket) {
    char value[2048], prefix[4096], at[40]; struct text t = {0};
    snprintf(prefix, sizeof prefix, "%s/%s", bucket, parameter(r->query, "prefix", value, sizeof value) ? value : "");
    add(&t, "<ListMultipartUploadsResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>%s</Bucket><IsTruncated>false</IsTruncated>", bucket);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_uploads; i++) {
        struct upload *u = uploads[i];
        if (strncmp(u->key, prefix, strlen(prefix))) continue;
        date(at, u->at, 1);
        add(&t, "<Upload><Key>"); add_xml(&t, u->key + strlen(bucket) + 1);
        add(&t, "</Key><UploadId>%llx</UploadId><Initiated>%s</Initiated></Upload>", u->id, at);
    }
    pthread_mutex_unlock(&lock);
    add(&t, "</ListMultipartUploadsResult>");
    int bad = reply(c, "200 OK", "Content-Type: application/xml\r\n", t.p, t.n);
    free(t.p);
    return bad;
}
static int create_upload(struct conn *c, const char *bucket, const char *key) {
    struct text t = {0};
    pthread_mutex_lock(&lock);
    if (num_uploads == cap_uploads) uploads = realloc(uploads, (cap_uploads = cap_uploads * 2 + 64) * sizeof *uploads);
    struct upload *u = uploads[num_uploads++] = calloc(1, sizeof *u);
    *u = (struct upload){strdup(key), ++serial, NULL, 0, time(NULL)};
    add(&t, "<InitiateMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>%s</Bucket><Key>", bucket);
    add_xml(&t, key + strlen(bucket) + 1);
    add(&t, "</Key><UploadId>%llx</UploadId></InitiateMultipartUploadResult>", u->id);
    pthread_mutex_unlock(&lock);
    int bad = reply(c, "200 OK", "Content-Type: application/xml\r\n", t.p, t.n);
    free(t.p);
    return bad;
}
static int with_upload(struct conn *c, struct request *r, const char *bucket, const char *key, const char *id, struct body *b) {
    char value[64], at[40]; struct text t = {0}, h = {0}; int bad = 0, number = 0;
    pthread_mutex_lock(&lock);
    struct upload *u = find_upload(key, id);
    if (!u) { pthread_mutex_unlock(&lock); return fail(c, "404 Not Found", "NoSuchUpload", 0); }
    if (r->method[0] == 'D') {
        end_upload(u);
        pthread_mutex_unlock(&lock);
        return reply(c, "204 No Content", "", "", 0);
    }
    if (r->method[0] == 'G') {
        date(at, u->at, 1);
        add(&t, "<ListPartsResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><UploadId>%s</UploadId><IsTruncated>false</IsTruncated>", id);
        for (int i = 0; i < u->num_parts; i++) {
            if (!u->parts[i].etag) continue;
            add(&t, "<Part><PartNumber>%d</PartNumber><LastModified>%s</LastModified><ETag>\"%032llx\"</ETag><Size>%lld</Size>", i + 1, at, u->parts[i].etag, u->parts[i].size);
            add_sum_xml(&t, &u->parts[i].sum);
            add(&t, "</Part>");
        }
        add(&t, "</ListPartsResult>");
    } else if (r->method[0] == 'P' && r->method[1] == 'U') {
        number = parameter(r->query, "partNumber", value, sizeof value) ? atoi(value) : 0;
        if (number < 1 || number > 10000) { pthread_mutex_unlock(&lock); return fail(c, "400 Bad Request", "InvalidArgument", 0); }
        if (number > u->num_parts) {
            u->parts = realloc(u->parts, number * sizeof *u->parts);
            memset(u->parts + u->num_parts, 0, (number - u->num_parts) * sizeof *u->parts);
            u->num_parts = number;
        }
        uint64_t value_crc = b->is_kept && b->size <= KEEP && b->algorithm ? crc(b->algorithm, 0, b->data ? b->data : "", b->size) : b->crc;
        free(u->parts[number - 1].data);
        u->parts[number - 1] = (struct part){b->size, ++serial, b->sum, b->algorithm, value_crc, b->is_kept ? b->data : NULL};
        if (b->is_kept) b->data = NULL;
        add(&h, "ETag: \"%032llx\"\r\n", serial);
        add_sum_header(&h, &b->sum, 0);
    } else { /* complete, of all parts that are there */
        long long size = 0; int algorithm = b->algorithm, is_kept = keeps_large, is_known = algorithm && verify_large; uint64_t whole = 0;
        for (int i = 0; i < u->num_parts; i++) {
            size += u->parts[i].size;
            is_kept &= u->parts[i].data || !u->parts[i].size;
            is_known &= u->parts[i].algorithm == algorithm;
            if (is_known) whole = i ? combine(algorithm, whole, u->parts[i].crc, u->parts[i].size) : u->parts[i].crc;
        }
        char text[16] = "";
        if (is_known) base64(algorithm, whole, text);
        if (is_known && strcmp(text, b->sum.value)) { pthread_mutex_unlock(&lock); return fail(c, "400 Bad Request", "BadDigest", 0); }
        char *data = is_kept ? malloc(size + 1) : NULL, *end = data;
        for (int i = 0; data && i < u->num_parts; end += u->parts[i++].size) {
            memcpy(end, u->parts[i].data, u->parts[i].size);
            free(u->parts[i].data); u->parts[i].data = NULL;
        }
        struct object *o = store(key, data, size, b->sum);
        end_upload(u);
        add(&t, "<CompleteMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>%s</Bucket><Key>", bucket);
        add_xml(&t, key + strlen(bucket) + 1);
        add(&t, "</Key><ETag>\"%032llx\"</ETag>", o->etag);
        add_sum_xml(&t, &o->sum);
        add(&t, "%s</CompleteMultipartUploadResult>", o->sum.name[0] ? "<ChecksumType>FULL_OBJECT</ChecksumType>" : "");
    }
    pthread_mutex_unlock(&lock);
    bad = reply(c, "200 OK", h.p ? h.p : "Content-Type: application/xml\r\n", t.p ? t.p : "", t.n);
    free(t.p); free(h.p);
    return bad;
}
static int answer(struct conn *c, struct request *r, struct body *b) {
    char bucket[256], id[64], ignored[64], *key = r->path + 1; int is_head = !strcmp(r->method, "HEAD");
    snprintf(bucket, sizeof bucket, "%.*s", (int)strcspn(key, "/"), key);
    int has_key = key[strlen(bucket)] == '/' && key[strlen(bucket) + 1];
    if (!strcmp(r->method, "PUT") && !is_right(b)) return fail(c, "400 Bad Request", "BadDigest", 0);
    if (!has_key) {
        if (is_head) return reply(c, "200 OK", "x-amz-bucket-region: us-east-1\r\n", "", 0);
        if (!strcmp(r->method, "POST")) return delete_objects(c, bucket, b);
        if (parameter(r->query, "uploads", ignored, sizeof ignored)) return list_uploads(c, r, bucket);
        if (!strcmp(r->method, "GET")) return list_objects(c, r, bucket);
    } else {
        if (parameter(r->query, "uploadId", id, sizeof id)) return with_upload(c, r, bucket, key, id, b);
        if (!strcmp(r->method, "POST")) return create_upload(c, bucket, key);
        if (!strcmp(r->method, "PUT")) return put_object(c, r, key, b);
        if (is_head || !strcmp(r->method, "GET")) return get_object(c, r, key);
        if (!strcmp(r->method, "DELETE")) {
            pthread_mutex_lock(&lock); erase(key); pthread_mutex_unlock(&lock);
            return reply(c, "204 No Content", "", "", 0);
        }
    }
    return fail(c, "501 Not Implemented", "NotImplemented", is_head);
}
static int is_too_many(void) { /* within this second */
    static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
    static time_t second; static int count;
    if (!limit_per_s) return 0;
    pthread_mutex_lock(&counting);
    time_t now = (time_t)now_s();
    if (now != second) second = now, count = 0;
    int is_over = ++count > limit_per_s;
    pthread_mutex_unlock(&counting);
    return is_over;
}
static int serve_one(struct conn *c) {
    char target[4096] = "", *s = line(c); struct request r = {.from = -1, .to = -1};
    struct body b = {.is_kept = 1}; long long length = 0, framed = 0, decoded = -1; int is_chunked = 0, is_aws = 0, expects = 0;
    if (!s) return -1;
    sscanf(s, "%15s %4095s", r.method, target);
    while ((s = line(c)) && *s) {
        if (!strncasecmp(s, "content-length:", 15)) length = atoll(s + 15);
        else if (!strncasecmp(s, "transfer-encoding:", 18) && strcasestr(s, "chunked")) is_chunked = 1;
        else if (!strncasecmp(s, "content-encoding:", 17) && strcasestr(s, "aws-chunked")) is_aws = 1;
        else if (!strncasecmp(s, "x-amz-decoded-content-length:", 29)) decoded = atoll(s + 29);
        else if (!strncasecmp(s, "x-amz-trailer:", 14)) promise_checksum(&b, s + 14);
        else if (!strncasecmp(s, "expect:", 7)) expects = 1;
        else if (!strncasecmp(s, "if-none-match:", 14)) r.if_none = 1;
        else if (!strncasecmp(s, "if-match:", 9)) snprintf(r.if_match, sizeof r.if_match, "%s", s + 9);
        else if (!strncasecmp(s, "range:", 6) && strchr(s, '=')) sscanf(strchr(s, '=') + 1, "%lld-%lld", &r.from, &r.to);
        else note_checksum(&b, s);
    }
    if (!s) return -1;
    if (expects && put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return -1;
    if (length > KEEP && !keeps_large) b.is_kept = 0;
    struct frames frames = {0};
    if (is_chunked && is_aws) b.frames = &frames;
    int bad = is_chunked || is_aws ? read_chunked(c, &b, &framed) : read_plain(c, length, &b);
    if ((b.frames && frames.at != END) || (is_aws && !is_chunked && framed != length) || (is_aws && decoded >= 0 && decoded != b.size)) bad = -1;
    b.frames = NULL;
    if (bad) { free(b.data); return -1; }
    char *query = strchr(target, '?');
    if (query) { *query++ = 0; snprintf(r.query, sizeof r.query, "%s", query); }
    snprintf(r.path, sizeof r.path, "%s", target);
    decode(r.path);
    if (!strcmp(r.path, "/__stats")) {
        char text[128]; int n = snprintf(text, sizeof text, "%lld %lld %lld %d\n", atomic_load(&bytes_in), atomic_load(&bytes_out), atomic_load(&requests), atomic_exchange(&most_open, atomic_load(&num_open)));
        bad = reply(c, "200 OK", "Content-Type: text/plain\r\n", text, n);
    } else {
        atomic_fetch_add(&requests, 1);
        if (log_file) fprintf(log_file, "%s %s?%s\n", r.method, r.path, r.query);
        if (delay_ms) usleep(delay_ms * 1000);
        if (is_too_many()) bad = fail(c, "503 Slow Down", "SlowDown", !strcmp(r.method, "HEAD"));
        else {
            if (!strcmp(r.method, "PUT")) atomic_fetch_add(&bytes_in, b.size);
            bad = answer(c, &r, &b);
        }
    }
    free(b.data);
    return bad;
}
static void *serve(void *arg) {
    static atomic_int number;
    struct conn c = {.fd = (int)(long)arg, .buf = malloc(BUF), .rate = rate};
    if (slow_every && atomic_fetch_add(&number, 1) % slow_every == slow_every - 1) c.rate = rate / 10;
    int one = 1; setsockopt(c.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (int n = atomic_fetch_add(&num_open, 1) + 1, most = atomic_load(&most_open); most < n && !atomic_compare_exchange_weak(&most_open, &most, n);) {}
#ifdef TLS
    if (tls) { c.ssl = SSL_new(tls); SSL_set_fd(c.ssl, c.fd); SSL_set_accept_state(c.ssl); }
#endif
    while (!serve_one(&c)) {}
#ifdef TLS
    if (c.ssl) SSL_free(c.ssl);
#endif
    close(c.fd); free(c.buf);
    atomic_fetch_sub(&num_open, 1);
    return NULL;
}
static void *end_with_stdin(void *arg) {
    char ignored[64];
    while (read(0, ignored, sizeof ignored) > 0) {}
    _exit(0);
    return arg;
}
int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "verify")) verify_large = 1;
        else if (!strcmp(argv[i], "stdin")) ends_with_stdin = 1;
        else if (!strncmp(argv[i], "keep=", 5)) keeps_large = 1, atomic_store(&room, atoll(argv[i] + 5) << 20);
        else if (!strncmp(argv[i], "delay=", 6)) delay_ms = atoi(argv[i] + 6);
        else if (!strncmp(argv[i], "rate=", 5)) rate = atof(argv[i] + 5) * 1024;
        else if (!strncmp(argv[i], "total=", 6)) total = atof(argv[i] + 6) * 1024;
        else if (!strncmp(argv[i], "slow=", 5)) slow_every = atoi(argv[i] + 5);
        else if (!strncmp(argv[i], "limit=", 6)) limit_per_s = atoi(argv[i] + 6);
        else if (!strncmp(argv[i], "log=", 4) && (log_file = fopen(argv[i] + 4, "w"))) setlinebuf(log_file);
#ifdef TLS
        else if (!strncmp(argv[i], "tls=", 4) && (tls = SSL_CTX_new(TLS_server_method())) &&
                 SSL_CTX_use_certificate_chain_file(tls, argv[i] + 4) == 1 && SSL_CTX_use_PrivateKey_file(tls, argv[i] + 4, SSL_FILETYPE_PEM) == 1 &&
                 SSL_CTX_set_ciphersuites(tls, "TLS_AES_128_GCM_SHA256") == 1 && SSL_CTX_set_cipher_list(tls, "ECDHE+AES128+AESGCM") == 1) {}
#endif
        else { fprintf(stderr, "sink: cannot use %s\n", argv[i]); return 2; }
    }
    pthread_t watcher;
    if (ends_with_stdin) pthread_create(&watcher, NULL, end_with_stdin, NULL);
    zeros = calloc(1, BUF); make_tables();
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    int window = 256 << 10; /* else loopback takes megabytes of a body before any of it has passed the link */
    if (rate || total) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &window, sizeof window), setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &window, sizeof window);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 9100), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 1024)) { perror("sink"); return 1; }
    socklen_t size = sizeof a; getsockname(fd, (struct sockaddr *)&a, &size);
    printf("%d\n", ntohs(a.sin_port)); fflush(stdout); /* port 0 takes a free one: say which */
    for (;;) {
        int c = accept(fd, NULL, NULL); pthread_t t;
        if (c >= 0 && !pthread_create(&t, NULL, serve, (void *)(long)c)) pthread_detach(t); else if (c >= 0) close(c);
    }
}
