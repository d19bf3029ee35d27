/* Preloaded: while the file named by HANGS is there, a read of a file with ".hung" in its path waits; a look at it, too, with HANGS_NAMES. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void hang(const char *path)
{
    const char *flag = getenv("HANGS");
    char note[4096];
    int out;

    if (flag == NULL || path == NULL || strstr(path, ".hung") == NULL || access(flag, F_OK) != 0)
        return;
    snprintf(note, sizeof note, "%s.waiting", flag);
    out = open(note, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (out >= 0)
        close(out);
    while (access(flag, F_OK) == 0)
        usleep(10000);
}

static ssize_t forward(const char *name, int descriptor, void *data, size_t length, off64_t offset)
{
    ssize_t (*real)(int, void *, size_t, off64_t) = (ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, name);
    char link[64], path[4096];
    ssize_t size;

    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    size = readlink(link, path, sizeof path - 1);
    path[size > 0 ? size : 0] = 0;
    hang(path);
    return real(descriptor, data, length, offset);
}

ssize_t pread(int descriptor, void *data, size_t length, off_t offset) { return forward("pread", descriptor, data, length, offset); }
ssize_t pread64(int descriptor, void *data, size_t length, off64_t offset) { return forward("pread64", descriptor, data, length, offset); }

static int look(const char *name, const char *path, void *status)
{
    int (*real)(const char *, void *) = (int (*)(const char *, void *))dlsym(RTLD_NEXT, name);

    if (getenv("HANGS_NAMES") != NULL)
        hang(path);
    return real(path, status);
}

int stat(const char *path, struct stat *status) { return look("stat", path, status); }
int stat64(const char *path, struct stat64 *status) { return look("stat64", path, status); }
