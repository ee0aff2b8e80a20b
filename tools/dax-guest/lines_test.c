// What durable_lines.c is tested with, in the guest: stores lines of a file on DAX in different ways, and tells after a
// power cut which of them are there.
//
//     lines_test write FILE     stores, says so, and waits
//     lines_test check FILE     ends with 0 if exactly what was flushed and fenced is left

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LINE_BYTES = 64, LINES = 4096, BYTES = LINE_BYTES * LINES };

// How a line is stored. What is flushed but not fenced cannot be tested: the next interrupt fences it.
enum way { STORED, CLWB, CLFLUSHOPT, CLFLUSH, NON_TEMPORAL, STORED_AGAIN, WAYS };

static const char *const NAMES[] = {"only stored", "clwb", "clflushopt", "clflush", "non-temporal", "stored after clwb"};

// First and second content of a word.
static uint64_t first(int line, int word) { return (uint64_t)line * 8 + (uint64_t)word + 1; }
static uint64_t second(int line, int word) { return ~first(line, word); }

static void store(uint64_t *words, int line, uint64_t (*content)(int, int)) {
    for (int word = 0; word < 8; word++) ((volatile uint64_t *)words)[word] = content(line, word);
}

static void write_line(uint64_t *words, int line) {
    switch (line % WAYS) {
    case NON_TEMPORAL:
        for (int word = 0; word < 8; word++)
            __asm__ volatile("movnti %1, %0" : "=m"(words[word]) : "r"(first(line, word)));
        return;
    case STORED: store(words, line, first); return;
    case CLFLUSHOPT: store(words, line, first); __asm__ volatile("clflushopt %0" : "+m"(*words)::"memory"); return;
    case CLFLUSH: store(words, line, first); __asm__ volatile("clflush %0" : "+m"(*words)::"memory"); return;
    default: store(words, line, first); __asm__ volatile("clwb %0" : "+m"(*words)::"memory"); return;
    }
}

int main(int count, char **arguments) {
    int file = count == 3 ? open(arguments[2], O_RDWR | O_CREAT, 0600) : -1;
    if (file < 0 || posix_fallocate(file, 0, BYTES) != 0 || fsync(file) != 0) return 2;
    uint64_t *words = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, file, 0);
    if (words == MAP_FAILED) return 2;

    if (strcmp(arguments[1], "write") == 0) {
        for (int line = 0; line < LINES; line++) write_line(words + line * 8, line);
        __asm__ volatile("sfence" ::: "memory");
        for (int line = 0; line < LINES; line++)
            if (line % WAYS == STORED_AGAIN) store(words + line * 8, line, second);
        puts("lines_test: written");
        fflush(stdout);
        for (;;) pause();
    }

    int wrong[WAYS] = {0}, wrong_lines = 0;
    for (int line = 0; line < LINES; line++) {
        uint64_t expected[8];
        for (int word = 0; word < 8; word++) expected[word] = line % WAYS == STORED ? 0 : first(line, word);
        if (memcmp(expected, words + line * 8, LINE_BYTES) == 0) continue;
        wrong[line % WAYS]++;
        wrong_lines++;
    }
    for (int way = 0; way < WAYS; way++)
        if (wrong[way] > 0) printf("lines_test: %s: %d lines are not as they must be\n", NAMES[way], wrong[way]);
    return wrong_lines > 0;
}
