// A plug-in of QEMU's emulation that keeps a second image of the NVDIMM: of all that the guest stores there, this one gets
// only what was written back and fenced. It is the least that a power cut may leave.
//
// - clwb, clflushopt and clflush copy their line as it is at that moment; non-temporal stores copy the words they store.
// - sfence, mfence and every locked instruction put the copies of their processor into the image.
// - Nothing else does: no eviction, no wbinvd, and clflush has to be fenced like the others.
//
// The kernel's writes go the same way: memcpy_flushcache is made of non-temporal stores and clwb.
//
// Arguments: image=FILE (the NVDIMM's own), durable=FILE (a copy of it), address=N (where the guest has it).
//
// For QEMU's plug-in interface of version 1 (QEMU 7.2), which says nothing of registers, and for which an instruction
// that accesses no memory, as the emulated clwb, has no address. Both come from functions of QEMU that are not part of that
// interface, but that its executable exports. Only for a guest whose processors take turns (thread=single): nothing here
// is locked, and no store is seen by halves.

#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

// ---- QEMU, whose package comes without headers ----

#define EXPORT __attribute__((visibility("default")))

struct qemu_info;
struct block;
struct instruction;

EXPORT int qemu_plugin_version = 1;

enum { NO_REGISTERS = 0 };
enum { MEMORY_WRITE = 2 };

typedef void (*translated_callback)(uint64_t, struct block *);
typedef void (*executed_callback)(unsigned, void *);
typedef void (*stored_callback)(unsigned, uint32_t, uint64_t, void *);

void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, translated_callback);
void qemu_plugin_register_vcpu_insn_exec_cb(struct instruction *, executed_callback, int, void *);
void qemu_plugin_register_vcpu_mem_cb(struct instruction *, stored_callback, int, int, void *);
void qemu_plugin_register_atexit_cb(uint64_t, void (*)(uint64_t, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct block *);
struct instruction *qemu_plugin_tb_get_insn(const struct block *, size_t);
const void *qemu_plugin_insn_data(const struct instruction *);
size_t qemu_plugin_insn_size(const struct instruction *);
uint64_t qemu_plugin_insn_vaddr(const struct instruction *);
unsigned qemu_plugin_mem_size_shift(uint32_t);

// Not of the plug-in interface.
struct processor;
struct byte_array {
    uint8_t *data;
    unsigned length;
};
struct processor *qemu_get_cpu(int);
uint64_t cpu_get_phys_page_debug(struct processor *, uint64_t);
int x86_cpu_gdb_read_register(struct processor *, struct byte_array *, int);
// Of GLib, which QEMU has loaded.
struct byte_array *g_byte_array_new(void);
struct byte_array *g_byte_array_set_size(struct byte_array *, unsigned);

// ---- state ----

enum { LINE_BYTES = 64, WORD_BYTES = 8, PAGE_BYTES = 4096, PROCESSORS_MAX = 16 };

// Words of the NVDIMM as they were when they were on their way to it.
struct copy {
    uint64_t offset;
    uint64_t number;
    uint32_t count;
    uint64_t words[LINE_BYTES / WORD_BYTES];
};

static struct {
    struct copy *copies;
    size_t count, capacity;
    // Where the non-temporal store that comes next must go.
    uint64_t expected_address;
    struct byte_array *value;
} processors[PROCESSORS_MAX];

static const uint8_t *image;
static uint8_t *durable;
static uint64_t address, size;
// Number of the newest copy of each word that is durable. One that was made earlier and fenced later, by another
// processor, must not replace it.
static uint64_t *durable_numbers;
static uint64_t copies_made;
static uint64_t flushes, stores, fences, addresses_checked;

static void fail(const char *problem, uint64_t where) {
    fprintf(stderr, "durable_lines: failed: %s at 0x%" PRIx64 "\n", problem, where);
    // Not exit, which would wait for this very thread.
    _Exit(1);
}

// ---- what happens in the guest ----

// Offset in the NVDIMM of a virtual address, or UINT64_MAX.
static uint64_t offset_of(unsigned processor, uint64_t virtual_address) {
    uint64_t in_page = virtual_address % PAGE_BYTES;
    uint64_t page = cpu_get_phys_page_debug(qemu_get_cpu((int)processor), virtual_address - in_page);
    if (page == UINT64_MAX || page < address || page - address >= size) return UINT64_MAX;
    return page - address + in_page;
}

// Takes whole words along that begin in the given bytes, which are of one page.
static void copy_words(unsigned processor, uint64_t offset, uint32_t bytes) {
    if (processors[processor].count == processors[processor].capacity) {
        size_t capacity = processors[processor].capacity * 2 + 1024;
        void *copies = realloc(processors[processor].copies, capacity * sizeof(struct copy));
        if (!copies) fail("no memory", offset);
        processors[processor].copies = copies;
        processors[processor].capacity = capacity;
    }
    struct copy *copy = &processors[processor].copies[processors[processor].count++];
    copy->offset = offset / WORD_BYTES * WORD_BYTES;
    copy->count = (uint32_t)((offset + bytes - copy->offset + WORD_BYTES - 1) / WORD_BYTES);
    copy->number = ++copies_made;
    memcpy(copy->words, image + copy->offset, (size_t)copy->count * WORD_BYTES);
}

static void on_fence(unsigned processor, void *unused) {
    (void)unused;
    if (processors[processor].count == 0) return;
    fences++;
    for (size_t index = 0; index < processors[processor].count; index++) {
        const struct copy *copy = &processors[processor].copies[index];
        for (uint32_t word = 0; word < copy->count; word++) {
            uint64_t offset = copy->offset + word * WORD_BYTES;
            uint64_t *newest = &durable_numbers[offset / WORD_BYTES];
            if (copy->number < *newest) continue;
            *newest = copy->number;
            memcpy(durable + offset, &copy->words[word], WORD_BYTES);
        }
    }
    processors[processor].count = 0;
}

// Memory operand of an instruction: registers by their number in its encoding, -1 for none.
struct operand {
    int base, index, shift;
    int64_t displacement;
};

// A register by its number in an encoding: rax rcx rdx rbx rsp rbp rsi rdi r8 ... r15.
static uint64_t read_register(unsigned processor, int number) {
    // In the order of GDB.
    static const uint8_t numbers[] = {0, 2, 3, 1, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15};
    struct byte_array *value = processors[processor].value;
    if (!value) value = processors[processor].value = g_byte_array_new();
    g_byte_array_set_size(value, 0);
    if (x86_cpu_gdb_read_register(qemu_get_cpu((int)processor), value, numbers[number]) != 8)
        fail("a register cannot be read", (uint64_t)number);
    uint64_t content;
    memcpy(&content, value->data, sizeof(content));
    return content;
}

static uint64_t address_of(unsigned processor, const struct operand *operand) {
    uint64_t sum = (uint64_t)operand->displacement;
    if (operand->base >= 0) sum += read_register(processor, operand->base);
    if (operand->index >= 0) sum += read_register(processor, operand->index) << operand->shift;
    return sum;
}

static void on_flush(unsigned processor, void *operand) {
    uint64_t line = address_of(processor, operand) / LINE_BYTES * LINE_BYTES;
    uint64_t offset = offset_of(processor, line);
    if (offset == UINT64_MAX) return;
    flushes++;
    copy_words(processor, offset, LINE_BYTES);
}

static void before_non_temporal_store(unsigned processor, void *operand) {
    processors[processor].expected_address = address_of(processor, operand);
}

static void on_non_temporal_store(unsigned processor, uint32_t access, uint64_t virtual_address, void *operand) {
    // QEMU says where a store went, so these show whether registers are read as they are. A vector is stored in parts.
    if (operand) {
        uint64_t expected = processors[processor].expected_address;
        if (virtual_address - expected >= LINE_BYTES) fail("a register was read wrong", virtual_address);
        addresses_checked++;
    }
    uint64_t offset = offset_of(processor, virtual_address);
    if (offset == UINT64_MAX) return;
    stores++;
    uint32_t bytes = 1u << qemu_plugin_mem_size_shift(access);
    if (virtual_address % PAGE_BYTES + bytes > PAGE_BYTES) fail("a non-temporal store over two pages", virtual_address);
    copy_words(processor, offset, bytes);
}

// An instruction runs whose address nobody can tell.
static void on_unknown_address(unsigned processor, void *where) {
    (void)processor;
    fail("a flush whose address was computed just before it", (uint64_t)(uintptr_t)where);
}

// ---- what an instruction is ----

enum kind { OTHER, FLUSH, FENCE, NON_TEMPORAL_STORE };

struct decoded {
    enum kind kind;
    bool has_memory_operand, has_segment;
    struct operand operand;
    // General registers that it may change, one bit each.
    uint16_t changes;
};

enum { ALL_REGISTERS = 0xffff };

// Registers that an instruction without VEX may change. Those that are not listed may change all.
static uint16_t changed_by(int map, uint8_t opcode, bool has_memory, int reg, int group, int rm, uint8_t rex_b) {
    uint16_t into_reg = (uint16_t)(1u << reg), into_rm = has_memory ? 0 : (uint16_t)(1u << rm);
    if (map == 1) {
        switch (opcode) {
        case 0x0d: case 0x18: case 0x1e: case 0x1f: // prefetch, nop
        case 0x10: case 0x11: case 0x28: case 0x29: case 0x6f: case 0x7f: case 0x57: case 0xef: // vectors
        case 0x2b: case 0xe7: case 0xc3: // non-temporal stores
            return 0;
        case 0xae: // fences and flushes; saved states are memory
            return 0;
        case 0xaf: case 0xb6: case 0xb7: case 0xbe: case 0xbf:
            return into_reg;
        }
        return (opcode & 0xf0) == 0x40 ? into_reg : ALL_REGISTERS;
    }
    if (opcode < 0x40) {
        bool compares = opcode >= 0x38;
        switch (opcode & 7) {
        case 0: case 1: return compares ? 0 : into_rm;
        case 2: case 3: return compares ? 0 : into_reg;
        case 4: case 5: return compares ? 0 : 1;
        }
        return ALL_REGISTERS;
    }
    switch (opcode) {
    case 0x80: case 0x81: case 0x83: return group == 7 ? 0 : into_rm;
    case 0x84: case 0x85: case 0x90: case 0xa8: case 0xa9: return 0;
    case 0x88: case 0x89: case 0xc6: case 0xc7: return into_rm;
    case 0xc0: case 0xc1: case 0xd0: case 0xd1: case 0xd2: case 0xd3: return into_rm;
    case 0x63: case 0x69: case 0x6b: case 0x8a: case 0x8b: case 0x8d: return into_reg;
    case 0xff: return group < 2 ? into_rm : ALL_REGISTERS;
    }
    if (opcode >= 0xb8 && opcode <= 0xbf) return (uint16_t)(1u << ((opcode & 7) | rex_b << 3));
    return ALL_REGISTERS;
}

static struct decoded decode(const uint8_t *code, size_t length, uint64_t where) {
    struct decoded decoded = {.changes = ALL_REGISTERS, .operand = {.base = -1, .index = -1}};
    size_t at = 0;
    bool has_66 = false, has_lock = false, has_vex = false;
    uint8_t rex = 0;
    int map = 0;
    for (; at < length; at++) {
        uint8_t byte = code[at];
        if (byte == 0x66) has_66 = true;
        else if (byte == 0xf0) has_lock = true;
        else if (byte == 0x64 || byte == 0x65) decoded.has_segment = true;
        else if (byte != 0x2e && byte != 0x36 && byte != 0x3e && byte != 0x26 && byte != 0xf2 && byte != 0xf3) break;
    }
    if (at < length && (code[at] & 0xf0) == 0x40) rex = code[at++];
    if (at + 2 < length && code[at] == 0xc5) {
        // Two-byte VEX: R is inverted.
        has_vex = true;
        map = 1;
        rex = code[at + 1] & 0x80 ? 0 : 4;
        at += 2;
    } else if (at + 3 < length && code[at] == 0xc4) {
        has_vex = true;
        map = code[at + 1] & 0x1f;
        rex = (uint8_t)(~code[at + 1] >> 5 & 7);
        at += 3;
    } else if (at + 1 < length && code[at] == 0x0f) {
        map = code[at + 1] == 0x38 ? 2 : code[at + 1] == 0x3a ? 3 : 1;
        at += map == 1 ? 1 : 2;
    }
    if (at >= length) return decoded;
    uint8_t opcode = code[at++];
    // Not every instruction has this byte; those that are told apart by it do.
    uint8_t modrm = at < length ? code[at++] : 0xc0;
    int mod = modrm >> 6, rm = modrm & 7, group = modrm >> 3 & 7;
    int reg = group | (rex & 4) << 1;
    bool has_memory = mod != 3;

    if (has_lock || (map == 0 && has_memory && (opcode == 0x86 || opcode == 0x87))) {
        decoded.kind = FENCE;
    } else if (map == 1 && opcode == 0xae && !has_vex) {
        if (mod == 3 && (group == 6 || group == 7)) decoded.kind = FENCE;
        // With 66, /6 is clwb and /7 clflushopt; without, xsaveopt and clflush.
        if (mod != 3 && (group == 7 || (group == 6 && has_66))) decoded.kind = FLUSH;
    } else if (map == 1 && has_memory && (opcode == 0x2b || opcode == 0xe7 || (opcode == 0xc3 && !has_vex))) {
        decoded.kind = NON_TEMPORAL_STORE;
    }
    if (has_vex) {
        bool only_vectors = map == 1 && (opcode == 0x10 || opcode == 0x11 || opcode == 0x28 || opcode == 0x29 ||
                                         opcode == 0x2b || opcode == 0x57 || opcode == 0x6f || opcode == 0x77 ||
                                         opcode == 0x7f || opcode == 0xe7 || opcode == 0xef);
        decoded.changes = only_vectors ? 0 : ALL_REGISTERS;
    } else if (map < 2) {
        decoded.changes = changed_by(map, opcode, has_memory, reg, group, rm | (rex & 1) << 3, rex & 1);
    }
    if (!has_memory || decoded.kind == OTHER || decoded.kind == FENCE) return decoded;

    decoded.has_memory_operand = true;
    decoded.operand.base = rm | (rex & 1) << 3;
    if (rm == 4 && at < length) {
        uint8_t sib = code[at++];
        decoded.operand.base = (sib & 7) | (rex & 1) << 3;
        decoded.operand.index = (sib >> 3 & 7) | (rex & 2) << 2;
        decoded.operand.shift = sib >> 6;
        if (decoded.operand.index == 4) decoded.operand.index = -1;
        if (mod == 0 && (sib & 7) == 5) decoded.operand.base = -1;
    }
    bool is_relative = mod == 0 && rm == 5;
    if (mod == 1 && at < length) {
        decoded.operand.displacement = (int8_t)code[at];
    } else if ((mod == 2 || is_relative || decoded.operand.base < 0) && at + 4 <= length) {
        int32_t displacement;
        memcpy(&displacement, code + at, sizeof(displacement));
        decoded.operand.displacement = displacement;
    }
    if (is_relative) {
        decoded.operand.base = -1;
        decoded.operand.displacement += (int64_t)(where + length);
    }
    return decoded;
}

static bool depends_on(const struct operand *operand, uint16_t registers) {
    return (operand->base >= 0 && registers >> operand->base & 1) ||
           (operand->index >= 0 && registers >> operand->index & 1);
}

// Instructions are translated in blocks. Within one, QEMU may hold a register that was changed in a register of the host, where
// it cannot be read; at the beginning of a block all of them can.
static void on_translated(uint64_t id, struct block *block) {
    (void)id;
    uint16_t changed = 0;
    for (size_t number = 0; number < qemu_plugin_tb_n_insns(block); number++) {
        struct instruction *instruction = qemu_plugin_tb_get_insn(block, number);
        uint64_t where = qemu_plugin_insn_vaddr(instruction);
        struct decoded decoded = decode(qemu_plugin_insn_data(instruction), qemu_plugin_insn_size(instruction), where);
        bool is_known = decoded.has_memory_operand && !decoded.has_segment && !depends_on(&decoded.operand, changed);
        struct operand *operand = NULL;
        if (is_known) {
            // Lives as long as the translation, that is, for ever; there are few.
            operand = malloc(sizeof(*operand));
            if (!operand) fail("no memory", where);
            *operand = decoded.operand;
        }
        switch (decoded.kind) {
        case FENCE:
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_fence, NO_REGISTERS, NULL);
            break;
        case FLUSH:
            if (is_known)
                qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_flush, NO_REGISTERS, operand);
            else
                qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_unknown_address, NO_REGISTERS, (void *)(uintptr_t)where);
            break;
        case NON_TEMPORAL_STORE:
            if (is_known)
                qemu_plugin_register_vcpu_insn_exec_cb(instruction, before_non_temporal_store, NO_REGISTERS, operand);
            qemu_plugin_register_vcpu_mem_cb(instruction, on_non_temporal_store, NO_REGISTERS, MEMORY_WRITE, operand);
            break;
        case OTHER:
            break;
        }
        changed |= decoded.changes;
    }
}

static void on_exit_of_qemu(uint64_t id, void *unused) {
    (void)id;
    (void)unused;
    fprintf(stderr,
            "durable_lines: %" PRIu64 " lines flushed, %" PRIu64 " non-temporal stores, %" PRIu64 " fences after them; "
            "%" PRIu64 " addresses compared\n",
            flushes, stores, fences, addresses_checked);
}

static void *map_file(const char *path, int protection) {
    int file = open(path, protection & PROT_WRITE ? O_RDWR : O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) return NULL;
    if (size == 0) size = (uint64_t)status.st_size;
    if (size != (uint64_t)status.st_size) return NULL;
    void *content = mmap(NULL, size, protection, MAP_SHARED, file, 0);
    return content == MAP_FAILED ? NULL : content;
}

EXPORT int qemu_plugin_install(uint64_t id, const struct qemu_info *info, int count, char **arguments) {
    (void)info;
    for (int number = 0; number < count; number++) {
        const char *argument = arguments[number];
        if (strncmp(argument, "image=", 6) == 0) image = map_file(argument + 6, PROT_READ);
        if (strncmp(argument, "durable=", 8) == 0) durable = map_file(argument + 8, PROT_READ | PROT_WRITE);
        if (strncmp(argument, "address=", 8) == 0) address = strtoull(argument + 8, NULL, 0);
    }
    if (!image || !durable || address == 0) {
        fprintf(stderr, "durable_lines: failed: needs image and durable, files of one size, and address\n");
        return 1;
    }
    // Pages that nobody touches cost nothing.
    durable_numbers = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (durable_numbers == MAP_FAILED) return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translated);
    qemu_plugin_register_atexit_cb(id, on_exit_of_qemu, NULL);
    return 0;
}
