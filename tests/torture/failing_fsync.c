/* Preloaded: while the file named by FAILING_FSYNC is there, nothing can be forced to disk; each failure is noted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int fails(void)
{
    const char *path = getenv("FAILING_FSYNC");
    char note[4096];
    int out;

    if (path == NULL || access(path, F_OK) != 0)
        return 0;
    snprintf(note, sizeof note, "%s.failed", path);
    out = open(note, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out >= 0) {
        if (write(out, "x", 1) != 1)
            _exit(99);
        close(out);
    }
    errno = EIO;
    return 1;
}

static int forward(const char *name, int descriptor)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);

    return fails() ? -1 : real(descriptor);
}

int fsync(int descriptor) { return forward("fsync", descriptor); }
int fdatasync(int descriptor) { return forward("fdatasync", descriptor); }
