/* What a file system keeps of a process that goes on while it is shut down; why the process is stopped before: ../power_loss.rs.
 *
 * One thread appends records to a file, syncs it after each, and then stores the record's number to every page of a mapping;
 * two threads sync the mapping. After a power loss no page may name a record that the file does not have. As root:
 *
 *   cc -O1 -pthread after_shutdown.c -o after_shutdown && mkdir -p /dev/shm/shutdown/volume
 *   truncate -s 64M /dev/shm/shutdown/empty && mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 /dev/shm/shutdown/empty
 *   ./after_shutdown /dev/shm/shutdown 300          # goes on: 14 of 900 were wrong
 *   ./after_shutdown /dev/shm/shutdown 300 stop     # is stopped: 0 of 900
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 800
#define PAGE_BYTES 4096
#define RECORD_BYTES 250
#define SHUTDOWN _IOR('X', 125, uint32_t)

static volatile uint64_t *map;
static int log_fd;

static void check(int is_right, const char *what) {
    if (!is_right) {
        perror(what);
        exit(2);
    }
}

static void execute(const char *command) { check(system(command) == 0, command); }

static void *append(void *unused) {
    char record[RECORD_BYTES];
    for (uint64_t number = 1;; number++) {
        memset(record, (int)number, sizeof record);
        off_t offset = (off_t)((number - 1) * sizeof record);
        if (pwrite(log_fd, record, sizeof record, offset) != sizeof record || fdatasync(log_fd) != 0)
            return unused;
        for (int page = 0; page < PAGES; page++)
            map[page * (PAGE_BYTES / 8)] = number;
    }
}

static void *sync_map(void *unused) {
    for (;;)
        if (msync((void *)map, PAGES * PAGE_BYTES, MS_SYNC) != 0)
            usleep(50);
    return unused;
}

static void write_for_ever(const char *volume) {
    char path[300];
    snprintf(path, sizeof path, "%s/log", volume);
    check((log_fd = open(path, O_RDWR | O_CREAT, 0600)) >= 0, path);
    snprintf(path, sizeof path, "%s/map", volume);
    int map_fd = open(path, O_RDWR | O_CREAT, 0600);
    check(map_fd >= 0 && posix_fallocate(map_fd, 0, PAGES * PAGE_BYTES) == 0, path);
    map = mmap(0, PAGES * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, map_fd, 0);
    check(map != MAP_FAILED, "mmap");
    for (int page = 0; page < PAGES; page++)
        map[page * (PAGE_BYTES / 8)] = 0;
    check(fsync(map_fd) == 0 && fsync(log_fd) == 0 && fsync(open(volume, O_RDONLY)) == 0, "fsync");
    pthread_t thread;
    pthread_create(&thread, 0, append, 0);
    pthread_create(&thread, 0, sync_map, 0);
    pthread_create(&thread, 0, sync_map, 0);
    for (;;)
        pause();
}

static void wait_until_stopped(pid_t process) {
    for (char state = 0; state != 'T'; usleep(20)) {
        char path[64], line[300] = {0};
        snprintf(path, sizeof path, "/proc/%d/stat", process);
        FILE *file = fopen(path, "r");
        check(file && fgets(line, sizeof line, file), path);
        fclose(file);
        state = strrchr(line, ')')[2];
    }
}

/* Whether a page names a record that the file does not have. */
static int is_wrong(const char *volume) {
    char path[300];
    struct stat status;
    snprintf(path, sizeof path, "%s/log", volume);
    check(stat(path, &status) == 0, path);
    uint64_t records = (uint64_t)status.st_size / RECORD_BYTES, named = 0, number;
    snprintf(path, sizeof path, "%s/map", volume);
    int map_fd = open(path, O_RDONLY);
    for (int page = 0; page < PAGES; page++)
        if (pread(map_fd, &number, 8, (off_t)page * PAGE_BYTES) == 8 && number > named)
            named = number;
    close(map_fd);
    return named > records;
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "%s DIRECTORY SHUTDOWNS [stop]\n", arguments[0]);
        return 2;
    }
    const char *directory = arguments[1];
    int shutdowns = atoi(arguments[2]), wrong = 0;
    char volume[200], mount[700], unmount[700];
    snprintf(volume, sizeof volume, "%s/volume", directory);
    snprintf(mount, sizeof mount, "mount -o loop %s/image %s", directory, volume);
    snprintf(unmount, sizeof unmount, "until umount %s; do sleep 0.02; done", volume);
    for (int at = 0; at < shutdowns; at++) {
        char copy[700];
        snprintf(copy, sizeof copy, "cp --sparse=always %s/empty %s/image", directory, directory);
        execute(copy);
        execute(mount);
        pid_t process = fork();
        if (process == 0)
            write_for_ever(volume);
        usleep(30000 + rand() % 60000);
        int root = open(volume, O_RDONLY);
        /* 1: the file system's log is written first; 2: at once. */
        uint32_t how = rand() % 4 == 0 ? 1 : 2;
        if (count > 3) {
            kill(process, SIGSTOP);
            wait_until_stopped(process);
        }
        check(ioctl(root, SHUTDOWN, &how) == 0, "shutdown");
        close(root);
        usleep(3000);
        kill(process, SIGKILL);
        waitpid(process, 0, 0);
        execute(unmount);
        execute(mount);
        wrong += is_wrong(volume);
        execute(unmount);
    }
    printf("%d shutdowns, %d left a store that followed a sync without what was synced\n", shutdowns, wrong);
    return 0;
}
