/* LD_PRELOAD: counts the calls of a process that change files, in all its threads together, and ends it by SIGKILL
 * just before the n-th. Between two of them is everywhere that a kill can strike: nothing else changes a file.
 * (strace could do it too, where it is installed and allowed, but its `when=` counts each thread by itself.)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long num_calls, kill_at = -1; /* -1: not counting */

void shim_kill_at(long number) { atomic_store(&num_calls, 0); atomic_store(&kill_at, number); }
long shim_num_calls(void) { return atomic_load(&num_calls); }

static void count(const char *call, const char *path) {
    long at = atomic_load(&kill_at);
    if (at < 0 || atomic_fetch_add(&num_calls, 1) + 1 != at)
        return;
    dprintf(2, "killed before call %ld: %s %s\n", at, call, path);
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static int is_file(int fd) {
    struct stat facts;
    return atomic_load(&kill_at) >= 0 && fstat(fd, &facts) == 0 && (S_ISREG(facts.st_mode) || S_ISDIR(facts.st_mode));
}

static void count_fd(const char *call, int fd) {
    char link[64], path[4096];
    if (!is_file(fd))
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    count(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define BY_PATH(type, name, params, path, ...) \
    type name params { count(#name, path); return REAL(name)(__VA_ARGS__); }
#define BY_FD(type, name, params, fd, ...) \
    type name params { count_fd(#name, fd); return REAL(name)(__VA_ARGS__); }
#define CHANGES (O_CREAT | O_TRUNC)
#define MODE(last) mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, last); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) { MODE(flags) if (flags & CHANGES) count("open", path); return REAL(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) if (flags & CHANGES) count("open", path); return REAL(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) if (flags & CHANGES) count("openat", path); return REAL(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) if (flags & CHANGES) count("openat", path); return REAL(openat64)(at, path, flags, mode); }
BY_PATH(int, creat, (const char *path, mode_t mode), path, path, mode)
BY_PATH(int, link, (const char *from, const char *to), to, from, to)
BY_PATH(int, linkat, (int at, const char *from, int to_at, const char *to, int flags), to, at, from, to_at, to, flags)
BY_PATH(int, symlink, (const char *target, const char *path), path, target, path)
BY_PATH(int, symlinkat, (const char *target, int at, const char *path), path, target, at, path)
BY_PATH(int, rename, (const char *from, const char *to), to, from, to)
BY_PATH(int, renameat, (int at, const char *from, int to_at, const char *to), to, at, from, to_at, to)
BY_PATH(int, renameat2, (int at, const char *from, int to_at, const char *to, unsigned flags), to, at, from, to_at, to, flags)
BY_PATH(int, unlink, (const char *path), path, path)
BY_PATH(int, unlinkat, (int at, const char *path, int flags), path, at, path, flags)
BY_PATH(int, rmdir, (const char *path), path, path)
BY_PATH(int, mkdir, (const char *path, mode_t mode), path, path, mode)
BY_PATH(int, mkdirat, (int at, const char *path, mode_t mode), path, at, path, mode)
BY_PATH(int, truncate, (const char *path, off_t size), path, path, size)
BY_PATH(int, utimensat, (int at, const char *path, const struct timespec times[2], int flags), path, at, path, times, flags)
BY_FD(ssize_t, write, (int fd, const void *data, size_t size), fd, fd, data, size)
BY_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, fd, data, size, at)
BY_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, fd, data, size, at)
BY_FD(ssize_t, writev, (int fd, const struct iovec *data, int num), fd, fd, data, num)
BY_FD(int, ftruncate, (int fd, off_t size), fd, fd, size)
BY_FD(int, ftruncate64, (int fd, off64_t size), fd, fd, size)
BY_FD(int, fallocate, (int fd, int mode, off_t at, off_t size), fd, fd, mode, at, size)
BY_FD(ssize_t, copy_file_range, (int from, off64_t *at, int to, off64_t *to_at, size_t size, unsigned flags), to, from, at, to, to_at, size, flags)
BY_FD(int, fsync, (int fd), fd, fd)
BY_FD(int, fdatasync, (int fd), fd, fd)
