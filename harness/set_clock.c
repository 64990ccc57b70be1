/* The wall clock of a process as another process sets it: loaded by LD_PRELOAD.

   SET_CLOCKS names a file of one 64-bit number a process id: the seconds that its clock is ahead. The file is
   mapped, so that a jump is seen at the next reading. Monotonic clocks are not touched. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t *ahead;
static int64_t known;

__attribute__((constructor)) static void map_it(void)
{
    const char *path = getenv("SET_CLOCKS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    struct stat found;
    if (file < 0)
        return;
    if (fstat(file, &found) == 0) {
        void *at = mmap(NULL, found.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) {
            ahead = at;
            known = found.st_size / sizeof *ahead;
        }
    }
    close(file);
}

static int64_t ahead_s(void)
{
    pid_t self = getpid();
    return ahead && self < known ? ahead[self] : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
