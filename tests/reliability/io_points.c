/* Preloaded into a process: its writes to files under a folder are counted, and one of them fails or is the last thing that the process
   does. What SQLite writes does not pass through Python, so faults.py cannot see it. What it maps (the -shm file) is not counted:
   the kernel keeps that as the process left it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char under[512];
static long at = -1, seen = 0;
static int how = 0; /* an errno; 0: killed, in the middle of what is written */

void points_set(const char *folder, long point, int error) {
    snprintf(under, sizeof under, "%s", folder);
    at = point, how = error;
    __atomic_store_n(&seen, 0, __ATOMIC_SEQ_CST);
}

long points_seen(void) { return __atomic_load_n(&seen, __ATOMIC_SEQ_CST); }

static int is_ours(const char *path) { return under[0] && strncmp(path, under, strlen(under)) == 0; }

static int of_descriptor(int fd) {
    char link[64], path[600];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = under[0] ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    return is_ours(path);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* 1: the call fails now, with errno set; 2: half of it is done, and then the process dies. */
static int reached(int ours) {
    if (!ours || __atomic_fetch_add(&seen, 1, __ATOMIC_SEQ_CST) != at) return 0;
    if (!how) return 2;
    errno = how;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t at_offset(int fd, const void *data, size_t count, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    int found = reached(of_descriptor(fd));
    if (found == 1) return -1;
    if (found == 2) real(fd, data, count / 2, offset), die();
    return real(fd, data, count, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) { return at_offset(fd, data, count, offset); }
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) { return at_offset(fd, data, count, offset); }

ssize_t write(int fd, const void *data, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = REAL(write);
    int found = reached(of_descriptor(fd));
    if (found == 1) return -1;
    if (found == 2) real(fd, data, count / 2), die();
    return real(fd, data, count);
}

#define ON_DESCRIPTOR(name, parameters, arguments)        \
    int name parameters {                                 \
        int found = reached(of_descriptor(fd));           \
        if (found == 1) return -1;                        \
        if (found == 2) die();                            \
        return REAL(name) arguments;                      \
    }
ON_DESCRIPTOR(fsync, (int fd), (fd))
ON_DESCRIPTOR(fdatasync, (int fd), (fd))
ON_DESCRIPTOR(ftruncate, (int fd, off_t size), (fd, size))
ON_DESCRIPTOR(ftruncate64, (int fd, off64_t size), (fd, size))
ON_DESCRIPTOR(fchmod, (int fd, mode_t mode), (fd, mode))
ON_DESCRIPTOR(posix_fallocate, (int fd, off_t from, off_t size), (fd, from, size))

#define ON_PATH(name, parameters, arguments)              \
    int name parameters {                                 \
        int found = reached(is_ours(path));               \
        if (found == 1) return -1;                        \
        if (found == 2) die();                            \
        return REAL(name) arguments;                      \
    }
ON_PATH(unlink, (const char *path), (path))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))

static int opened(const char *path, int flags, mode_t mode, const char *name) {
    int found = reached((flags & (O_CREAT | O_WRONLY | O_RDWR)) && is_ours(path));
    if (found == 1) return -1;
    if (found == 2) die();
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return opened(path, flags, mode, "open");
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return opened(path, flags, mode, "open64");
}
