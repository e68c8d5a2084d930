/* A GPU driver without a GPU: the functions of libcuda (or, with -DFAKE_HIP, of libamdhip64) that zse uses, over host memory.
 *
 * It is as lazy as a driver may be: work put into a stream runs only when somebody waits for it (a query runs one piece), each
 * stream on its own, so that a missing wait, event or stream order shows as wrong bytes. Device addresses are no host
 * addresses (bit 62 is set): touching device memory from the host faults. Fresh memory is filled with 0xCD. Memory of
 * the host that is not pinned is copied at the call, as drivers do; pinned memory is read when the copy runs.
 * fake_fail() makes a call fail; a sticky failure stays. With fake_set("eager_copies", 1) a stream that has copies and no kernels runs
 * as soon as nothing that it waits for is left: what overwrites too early shows, as lazy streams show what comes too late.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef FAKE_HIP
#define NAME(cuda, hip) hip
#define ERROR_PREFIX "hipError"
#else
#define NAME(cuda, hip) cuda
#define ERROR_PREFIX "CUDA_ERROR_"
#endif

typedef uint64_t address_t;
#define DEVICE_BIT (1ull << 62)
#define MAX_PARAMS 32
#define GRANULARITY (2u << 20)

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
       NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_UNJOINED = 904 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread uintptr_t current;
static int contexts, sticky;
#ifndef FAKE_HIP
static char context_object;
#endif

/* ---- settings, failures, counters: what a test asks for and looks at ---- */

static int settings_devices = 1, settings_version = 13000, settings_major = 9, settings_minor = 0, settings_vmm = 1;
static int settings_eager_copies, settings_register_us, settings_init_us, settings_mode, settings_mps, settings_shared = 232448, settings_read_only_register = 1;
static size_t memory_limit = 1ull << 30, memory_used;

#define MAX_RULES 64
static struct { char role[32]; int code, after, times; } rules[MAX_RULES];
static struct { char role[32]; long count; } counters[128];

void fake_set(const char *name, long long value) {
    if (!strcmp(name, "devices")) settings_devices = (int)value;
    else if (!strcmp(name, "version")) settings_version = (int)value;
    else if (!strcmp(name, "major")) settings_major = (int)value;
    else if (!strcmp(name, "minor")) settings_minor = (int)value;
    else if (!strcmp(name, "vmm")) settings_vmm = (int)value;
    else if (!strcmp(name, "mode")) settings_mode = (int)value;
    else if (!strcmp(name, "mps")) settings_mps = (int)value;
    else if (!strcmp(name, "shared")) settings_shared = (int)value;
    else if (!strcmp(name, "init_us")) settings_init_us = (int)value;
    else if (!strcmp(name, "register_us")) settings_register_us = (int)value;
    else if (!strcmp(name, "eager_copies")) settings_eager_copies = (int)value;
    else if (!strcmp(name, "memory")) memory_limit = (size_t)value;
    else if (!strcmp(name, "read_only_register")) settings_read_only_register = (int)value;
    else abort();
}

/* The call of `role` fails with `code` after `after` good ones, `times` times (-1: from then on). */
void fake_fail(const char *role, int code, int after, int times) {
    for (int i = 0; i < MAX_RULES; i++)
        if (!rules[i].role[0]) {
            snprintf(rules[i].role, sizeof rules[i].role, "%s", role);
            rules[i].code = code;
            rules[i].after = after;
            rules[i].times = times;
            return;
        }
    abort();
}

long fake_count(const char *role) {
    for (int i = 0; i < 128 && counters[i].role[0]; i++)
        if (!strcmp(counters[i].role, role)) return counters[i].count;
    return 0;
}

size_t fake_memory_used(void) { return memory_used; }
int fake_contexts(void) { return contexts; }

static int counted(const char *role, int needs_context) {
    int i = 0;
    while (i < 127 && counters[i].role[0] && strcmp(counters[i].role, role)) i++;
    snprintf(counters[i].role, sizeof counters[i].role, "%s", role);
    counters[i].count++;
    if (sticky && needs_context) return sticky;
    for (int rule = 0; rule < MAX_RULES; rule++)
        if (!strcmp(rules[rule].role, role)) {
            if (rules[rule].after-- > 0) continue;
            rules[rule].after = 0;
            if (rules[rule].times == 0) continue;
            if (rules[rule].times > 0) rules[rule].times--;
            if (rules[rule].code == ILLEGAL_ADDRESS) sticky = ILLEGAL_ADDRESS;
            return rules[rule].code;
        }
    return needs_context && !current ? INVALID_CONTEXT : OK;
}

/* Some functions are called without the lock, by several threads. */
static int enter(const char *role, int needs_context) {
    static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&counting);
    int status = counted(role, needs_context);
    pthread_mutex_unlock(&counting);
    return status;
}

#define ENTER(role)                             \
    pthread_mutex_lock(&lock);                  \
    int status = enter(role, 1);                \
    if (status) goto out
#define LEAVE                                   \
    out:                                        \
    pthread_mutex_unlock(&lock);                \
    return status

/* ---- memory ---- */

typedef struct range { uintptr_t start; size_t nbytes; int kind; struct range *next; } range_t;
enum { DEVICE = 1, PINNED, REGISTERED, RESERVED, MAPPED };
static range_t *ranges;

static range_t *find(uintptr_t start, size_t nbytes, int kind) {
    for (range_t *range = ranges; range; range = range->next)
        if (range->kind == kind && start >= range->start && start + nbytes <= range->start + range->nbytes) return range;
    return NULL;
}

static void add_range(uintptr_t start, size_t nbytes, int kind) {
    range_t *range = malloc(sizeof *range);
    *range = (range_t){start, nbytes, kind, ranges};
    ranges = range;
}

static size_t drop_range(uintptr_t start, int kind) {
    for (range_t **at = &ranges; *at; at = &(*at)->next)
        if ((*at)->start == start && (*at)->kind == kind) {
            range_t *range = *at;
            size_t nbytes = range->nbytes;
            *at = range->next;
            free(range);
            return nbytes;
        }
    return 0;
}

/* Pinned by allocation, or covered by registrations without a gap. */
static int is_pinned(uintptr_t start, size_t nbytes) {
    if (find(start, nbytes, PINNED)) return 1;
    uintptr_t at = start, end = start + nbytes;
    while (at < end) {
        range_t *range = find(at, 1, REGISTERED);
        if (!range) return 0;
        at = range->start + range->nbytes;
    }
    return 1;
}

/* Host pointer behind device bytes; NULL when they are not all allocated. */
static void *behind(address_t address, size_t nbytes) {
    uintptr_t start = address & ~DEVICE_BIT;
    if (!(address & DEVICE_BIT)) return find(start, nbytes, PINNED) ? (void *)start : NULL; /* one space of addresses */
    if (find(start, nbytes, DEVICE) || find(start, nbytes, PINNED)) return (void *)start;
    uintptr_t at = start, end = start + nbytes;
    while (at < end) {
        range_t *range = find(at, 1, MAPPED);
        if (!range) return NULL;
        at = range->start + range->nbytes;
    }
    return (void *)start;
}

/* For kernels. */
static char nowhere[1 << 16];
static void *device_bytes(address_t address, size_t nbytes) {
    void *found = behind(address, nbytes);
    if (found) return found;
    sticky = ILLEGAL_ADDRESS;
    return nowhere;
}

/* ---- streams, events, graphs ---- */

typedef struct event { long recorded, done; struct stream *stream; int timing, captured; float time; } event_t;
typedef void (*kernel_t)(void **params, const uint32_t *grid, uint32_t threads);
typedef struct { char name[64]; kernel_t run; const uint32_t *sizes; } function_t;
enum { KERNEL, TO_DEVICE, TO_HOST, COPY, SET, RECORD, WAIT, HOST };
typedef struct op {
    int kind;
    function_t *function;
    uint32_t grid[3], threads, shared, cluster, overlaps;
    char *params;
    address_t device, source;
    void *host;
    char *copied; /* content of memory that was not pinned */
    size_t nbytes;
    unsigned char value;
    event_t *event;
    struct stream *waited; /* where the event was recorded when the wait was put into its stream */
    long generation;
    struct stream *lane; /* of a captured op: its stream */
    struct op *next;
} op_t;
/* capture: of a capturing stream the stream that the capture began in, which collects the ops of all of them */
typedef struct stream { op_t *first, **last; int eager; struct stream *capture; } stream_t;
static float clock_ms;
static char *launch_log;
static size_t log_size;

/* One line a kernel that ran: name grid_x,grid_y,grid_z threads shared cluster overlaps */
const char *fake_log(void) { return launch_log ? launch_log : ""; }
void fake_log_clear(void) {
    free(launch_log);
    launch_log = NULL;
    log_size = 0;
}

static void log_launch(const op_t *op) {
    char line[160];
    int length = snprintf(line, sizeof line, "%s %u,%u,%u %u %u %u %u\n", op->function->name, op->grid[0], op->grid[1], op->grid[2],
                          op->threads, op->shared, op->cluster, op->overlaps);
    launch_log = realloc(launch_log, log_size + (size_t)length + 1);
    memcpy(launch_log + log_size, line, (size_t)length + 1);
    log_size += (size_t)length;
}

static void run_one(stream_t *stream);

static void run_until(event_t *event, struct stream *stream, long generation) {
    while (event->done < generation && stream && stream->first) run_one(stream);
}

static void perform(op_t *op) {
    clock_ms += 0.001f;
    if (sticky && op->kind != RECORD) return;
    void *device = op->kind <= SET && op->kind != KERNEL ? behind(op->device, op->nbytes) : NULL;
    if (op->kind <= SET && op->kind != KERNEL && op->nbytes && !device) {
        sticky = ILLEGAL_ADDRESS;
        return;
    }
    switch (op->kind) {
    case KERNEL: {
        void *params[MAX_PARAMS];
        char *at = op->params;
        for (int i = 0; op->function->sizes[i]; i++) {
            params[i] = at;
            at += (op->function->sizes[i] + 15) & ~15u;
        }
        log_launch(op);
        op->function->run(params, op->grid, op->threads);
        break;
    }
    case TO_DEVICE:
        if (op->copied) memcpy(device, op->copied, op->nbytes);
        else if (is_pinned((uintptr_t)op->host, op->nbytes)) memcpy(device, op->host, op->nbytes);
        else sticky = ILLEGAL_ADDRESS; /* unpinned before the copy ran */
        break;
    case TO_HOST:
        if (is_pinned((uintptr_t)op->host, op->nbytes)) memcpy(op->host, device, op->nbytes);
        else sticky = ILLEGAL_ADDRESS;
        break;
    case COPY: {
        void *source = behind(op->source, op->nbytes);
        if (source) memcpy(device, source, op->nbytes);
        else sticky = ILLEGAL_ADDRESS;
        break;
    }
    case SET: memset(device, op->value, op->nbytes); break;
    case RECORD:
        if (op->generation > op->event->done) op->event->done = op->generation;
        op->event->time = clock_ms;
        break;
    case WAIT: run_until(op->event, op->waited, op->generation); break;
    case HOST: ((void (*)(void *))(uintptr_t)op->device)(op->host); break;
    }
}

static void free_op(op_t *op) {
    free(op->params);
    free(op->copied);
    free(op);
}

static void run_one(stream_t *stream) {
    op_t *op = stream->first;
    stream->first = op->next;
    if (!stream->first) stream->last = &stream->first;
    perform(op);
    free_op(op);
}

static void run_all(stream_t *stream) {
    while (stream->first) run_one(stream);
}

static void put(stream_t *stream, op_t op) {
    op_t *kept = malloc(sizeof op);
    *kept = op;
    kept->next = NULL;
    kept->lane = stream;
    if (op.kind == WAIT && op.waited && op.waited->capture) stream->capture = op.waited->capture; /* it joins the capture */
    stream_t *into = stream->capture ? stream->capture : stream;
    *into->last = kept;
    into->last = &kept->next;
    if (stream->capture || !settings_eager_copies) return;
    if (op.kind == TO_DEVICE && !stream->eager) stream->eager = 1;
    if (op.kind == KERNEL) stream->eager = -1;
    while (stream->eager > 0 && stream->first) {
        op_t *next = stream->first;
        if (next->kind == WAIT && next->event->done < next->generation) break;
        run_one(stream);
    }
}

static op_t copy_of(const op_t *op) {
    op_t copy = *op;
    if (op->kind == KERNEL) {
        size_t size = 0;
        for (int i = 0; op->function->sizes[i]; i++) size += (op->function->sizes[i] + 15) & ~15u;
        copy.params = malloc(size + 1);
        memcpy(copy.params, op->params, size);
    }
    if (op->copied) {
        copy.copied = malloc(op->nbytes);
        memcpy(copy.copied, op->copied, op->nbytes);
    }
    return copy;
}

/* ---- the driver's functions ---- */

int NAME(cuInit, hipInit)(unsigned flags) {
    (void)flags;
    if (settings_init_us) usleep((useconds_t)settings_init_us);
    return enter("init", 0);
}

int NAME(cuDriverGetVersion, hipDriverGetVersion)(int *version) {
    *version = settings_version;
    return enter("driver_version", 0);
}

int NAME(cuDeviceGetCount, hipGetDeviceCount)(int *count) {
    *count = settings_devices;
    int status = enter("device_count", 0);
    return status ? status : settings_devices ? OK : 100;
}

int NAME(cuDeviceGet, hipDeviceGet)(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < settings_devices ? enter("device_get", 0) : 101;
}

int NAME(cuDeviceGetName, hipDeviceGetName)(char *name, int size, int device) {
    snprintf(name, (size_t)size, "Fake GPU %d", device);
    return enter("device_name", 0);
}

int NAME(cuDeviceTotalMem_v2, hipDeviceTotalMem)(size_t *total, int device) {
    (void)device;
    *total = memory_limit;
    return enter("device_total_memory", 0);
}

int NAME(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *value, int attribute, int device) {
    (void)device;
#ifdef FAKE_HIP
    switch (attribute) {
    case 23: *value = settings_major; break; /* hipDeviceAttributeComputeCapabilityMajor */
    case 61: *value = settings_minor; break;
    case 63: *value = 104; break;
    case 87: *value = 64; break;
    case 74: *value = 65536; break;
    default: *value = 0;
    }
#else
    switch (attribute) {
    case 75: *value = settings_major; break;
    case 76: *value = settings_minor; break;
    case 16: *value = 132; break;
    case 20: *value = settings_mode; break;
    case 38: *value = 50 << 20; break;
    case 97: *value = settings_shared; break;
    case 102: *value = settings_vmm; break;
    case 113: *value = settings_read_only_register; break;
    case 133: *value = settings_mps; if (settings_mps < 0) return 1; break; /* a driver that does not know it */
    default: *value = 0;
    }
#endif
    return enter("device_attribute", 0);
}

#ifdef FAKE_HIP
const char *hipGetErrorName(int code) {
    return code == OUT_OF_MEMORY ? "hipErrorOutOfMemory" : code == ILLEGAL_ADDRESS ? "hipErrorIllegalAddress"
         : code == 100 ? "hipErrorNoDevice" : "hipErrorUnknown";
}
const char *hipGetErrorString(int code) {
    (void)code;
    return "what a fake driver says";
}
int hipSetDevice(int device) {
    int status = enter("set_current", 0);
    if (!status) {
        current = (uintptr_t)device + 1;
        contexts |= 1;
    }
    return status ? status : sticky;
}
/* 0x600 bytes and more in ROCm 6: name at 0, gcnArchName at 1160. */
int hipGetDevicePropertiesR0600(char *properties, int device) {
    memset(properties, 0, 1472);
    snprintf(properties, 256, "Fake GPU %d", device);
    snprintf(properties + 1160, 256, "gfx942:sramecc+:xnack-");
    return enter("device_properties", 0);
}
int hipDeviceReset(void) {
    contexts = 0;
    return enter("context_release", 0);
}
#else
int cuGetErrorName(int code, const char **text) {
    static const struct { int code; const char *name; } names[] = {
        {1, "INVALID_VALUE"}, {2, "OUT_OF_MEMORY"}, {46, "DEVICE_UNAVAILABLE"}, {100, "NO_DEVICE"}, {101, "INVALID_DEVICE"},
        {200, "INVALID_IMAGE"}, {201, "INVALID_CONTEXT"}, {209, "NO_BINARY_FOR_GPU"}, {500, "NOT_FOUND"},
        {700, "ILLEGAL_ADDRESS"}, {712, "HOST_MEMORY_ALREADY_REGISTERED"}, {801, "NOT_SUPPORTED"}, {803, "SYSTEM_DRIVER_MISMATCH"},
        {900, "STREAM_CAPTURE_UNSUPPORTED"}, {999, "UNKNOWN"}};
    static __thread char buffer[64];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            snprintf(buffer, sizeof buffer, ERROR_PREFIX "%s", names[i].name);
            *text = buffer;
            return OK;
        }
    *text = NULL;
    return INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) {
    (void)code;
    *text = "what a fake driver says";
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    int status = enter("context_retain", 0);
    *context = &context_object;
    if (!status) contexts++;
    return status;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    contexts--;
    return enter("context_release", 0);
}
int cuCtxSetCurrent(void *context) {
    current = (uintptr_t)context;
    return enter("set_current", 0);
}
#endif

int NAME(cuMemGetInfo_v2, hipMemGetInfo)(size_t *free_bytes, size_t *total) {
    ENTER("memory_info");
    *total = memory_limit;
    *free_bytes = memory_limit - memory_used;
    LEAVE;
}

int NAME(cuMemAlloc_v2, hipMalloc)(address_t *address, size_t nbytes) {
    ENTER("alloc");
    if (!nbytes) status = INVALID_VALUE;
    else if (memory_used + nbytes > memory_limit) status = OUT_OF_MEMORY;
    else {
        void *memory = aligned_alloc(512, (nbytes + 511) & ~511ull);
        memset(memory, 0xCD, nbytes);
        memory_used += nbytes;
        add_range((uintptr_t)memory, nbytes, DEVICE);
        *address = (uintptr_t)memory | DEVICE_BIT;
    }
    LEAVE;
}

int NAME(cuMemFree_v2, hipFree)(address_t address) {
    ENTER("free");
    size_t nbytes = drop_range(address & ~DEVICE_BIT, DEVICE);
    if (!nbytes) status = INVALID_VALUE;
    else {
        memory_used -= nbytes;
        free((void *)(uintptr_t)(address & ~DEVICE_BIT));
    }
    LEAVE;
}

int NAME(cuMemHostAlloc, hipHostMalloc)(void **host, size_t nbytes, unsigned flags) {
    (void)flags;
    ENTER("host_alloc");
    *host = aligned_alloc(4096, (nbytes + 4095) & ~4095ull);
    memset(*host, 0xCD, nbytes);
    add_range((uintptr_t)*host, nbytes, PINNED);
    LEAVE;
}

int NAME(cuMemFreeHost, hipHostFree)(void *host) {
    ENTER("host_free");
    if (!drop_range((uintptr_t)host, PINNED)) status = INVALID_VALUE;
    else free(host);
    LEAVE;
}

int NAME(cuMemHostRegister_v2, hipHostRegister)(void *host, size_t nbytes, unsigned flags) {
    ENTER("host_register");
    uintptr_t start = (uintptr_t)host & ~4095ull, end = ((uintptr_t)host + nbytes + 4095) & ~4095ull;
    for (range_t *range = ranges; range; range = range->next)
        if (range->kind == REGISTERED && start < range->start + range->nbytes && range->start < end) status = ALREADY_REGISTERED;
    if ((uintptr_t)host != start || !nbytes || (flags != 8 && flags != 1)) status = INVALID_VALUE;
    else if (!status) add_range(start, end - start, REGISTERED);
    if (settings_register_us) usleep((useconds_t)settings_register_us);
    LEAVE;
}

int NAME(cuMemHostUnregister, hipHostUnregister)(void *host) {
    ENTER("host_unregister");
    if (!drop_range((uintptr_t)host, REGISTERED)) status = NOT_REGISTERED;
    LEAVE;
}

int NAME(cuMemsetD8Async, hipMemsetD8Async)(address_t device, unsigned char value, size_t nbytes, stream_t *stream) {
    ENTER("memset_async");
    put(stream, (op_t){.kind = SET, .device = device, .value = value, .nbytes = nbytes});
    LEAVE;
}

int NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(address_t device, void *host, size_t nbytes, stream_t *stream) {
    ENTER("to_device_async");
    op_t op = {.kind = TO_DEVICE, .device = device, .host = host, .nbytes = nbytes};
    if (!is_pinned((uintptr_t)host, nbytes)) {
        op.copied = malloc(nbytes);
        memcpy(op.copied, host, nbytes);
    }
    put(stream, op);
    LEAVE;
}

int NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void *host, address_t device, size_t nbytes, stream_t *stream) {
    ENTER("to_host_async");
    if (is_pinned((uintptr_t)host, nbytes)) put(stream, (op_t){.kind = TO_HOST, .device = device, .host = host, .nbytes = nbytes});
    else {
        run_all(stream);
        void *from = behind(device, nbytes);
        if (sticky) status = sticky;
        else if (!from) status = INVALID_VALUE;
        else memcpy(host, from, nbytes);
    }
    LEAVE;
}

int NAME(cuLaunchHostFunc, hipLaunchHostFunc)(stream_t *stream, void (*function)(void *), void *argument) {
    ENTER("launch_host");
    put(stream, (op_t){.kind = HOST, .device = (uintptr_t)function, .host = argument});
    LEAVE;
}

int NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(address_t device, address_t source, size_t nbytes, stream_t *stream) {
    ENTER("copy_async");
    put(stream, (op_t){.kind = COPY, .device = device, .source = source, .nbytes = nbytes});
    LEAVE;
}

int NAME(cuStreamCreate, hipStreamCreateWithFlags)(stream_t **stream, unsigned flags) {
    (void)flags;
    ENTER("stream_create");
    *stream = calloc(1, sizeof **stream);
    (*stream)->last = &(*stream)->first;
    LEAVE;
}

int NAME(cuStreamDestroy_v2, hipStreamDestroy)(stream_t *stream) {
    ENTER("stream_destroy");
    run_all(stream);
    LEAVE; /* kept: events may still name it */
}

int NAME(cuStreamSynchronize, hipStreamSynchronize)(stream_t *stream) {
    ENTER("stream_wait");
    if (stream->capture) status = CAPTURE_UNSUPPORTED;
    else {
        run_all(stream);
        status = sticky;
    }
    LEAVE;
}

int NAME(cuStreamWaitEvent, hipStreamWaitEvent)(stream_t *stream, event_t *event, unsigned flags) {
    (void)flags;
    ENTER("stream_wait_event");
    put(stream, (op_t){.kind = WAIT, .event = event, .waited = event->stream, .generation = event->recorded});
    LEAVE;
}

int NAME(cuEventCreate, hipEventCreateWithFlags)(event_t **event, unsigned flags) {
    ENTER("event_create");
    *event = calloc(1, sizeof **event);
    (*event)->timing = !(flags & 2);
    LEAVE;
}

int NAME(cuEventDestroy_v2, hipEventDestroy)(event_t *event) {
    ENTER("event_destroy");
    run_until(event, event->stream, event->recorded);
    free(event);
    LEAVE;
}

int NAME(cuEventRecord, hipEventRecord)(event_t *event, stream_t *stream) {
    ENTER("event_record");
    event->stream = stream;
    put(stream, (op_t){.kind = RECORD, .event = event, .generation = ++event->recorded});
    LEAVE;
}

int NAME(cuEventQuery, hipEventQuery)(event_t *event) {
    ENTER("event_query");
    if (event->done < event->recorded) {
        if (event->stream->first) run_one(event->stream);
        status = sticky ? sticky : event->done < event->recorded ? NOT_READY : OK;
    }
    LEAVE;
}

int NAME(cuEventSynchronize, hipEventSynchronize)(event_t *event) {
    ENTER("event_wait");
    run_until(event, event->stream, event->recorded);
    status = sticky;
    LEAVE;
}

int NAME(cuEventElapsedTime, hipEventElapsedTime)(float *ms, event_t *start, event_t *end) {
    ENTER("event_elapsed");
    if (!start->timing || !end->timing || start->done < start->recorded || end->done < end->recorded) status = INVALID_HANDLE;
    else *ms = end->time - start->time;
    LEAVE;
}

/* An image is the text "FAKEIMG"; its functions are those of this library. */
int NAME(cuModuleLoadData, hipModuleLoadData)(void **module, const void *image) {
    ENTER("module_load");
    if (memcmp(image, "FAKEIMG", 7)) status = INVALID_IMAGE;
    else *module = calloc(1, 8);
    LEAVE;
}

int NAME(cuModuleUnload, hipModuleUnload)(void *module) {
    ENTER("module_unload");
    free(module);
    LEAVE;
}

int NAME(cuModuleGetFunction, hipModuleGetFunction)(function_t **function, void *module, const char *name) {
    (void)module;
    ENTER("module_function");
    char sizes[80];
    Dl_info self;
    dladdr((void *)fake_log, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    snprintf(sizes, sizeof sizes, "%s_sizes", name);
    void *run = dlsym(library, name), *size_list = dlsym(library, sizes);
    if (!run || !size_list) status = NOT_FOUND;
    else {
        *function = calloc(1, sizeof **function);
        snprintf((*function)->name, sizeof (*function)->name, "%s", name);
        memcpy(&(*function)->run, &run, sizeof run);
        (*function)->sizes = size_list;
    }
    LEAVE;
}

#ifdef FAKE_HIP
int hipFuncSetAttribute(function_t *function, int attribute, int value) {
#else
int cuFuncSetAttribute(function_t *function, int attribute, int value) {
#endif
    (void)function, (void)attribute;
    ENTER("function_set_attribute");
    if (value > settings_shared) status = INVALID_VALUE;
    LEAVE;
}

static int launch(function_t *function, const uint32_t *grid, const uint32_t *block, uint32_t shared, stream_t *stream, void **params,
                  uint32_t cluster, uint32_t overlaps) {
    size_t size = 0;
    int count = 0;
    if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || !block[0] || block[0] > 1024) return INVALID_VALUE;
    if (cluster && grid[0] % cluster) return INVALID_VALUE;
    for (; function->sizes[count]; count++) size += (function->sizes[count] + 15) & ~15u;
    op_t op = {.kind = KERNEL, .function = function, .threads = block[0], .shared = shared, .cluster = cluster, .overlaps = overlaps};
    memcpy(op.grid, grid, sizeof op.grid);
    op.params = calloc(1, size + 1);
    char *at = op.params;
    for (int i = 0; i < count; i++) {
        if (function->sizes[i] == 128 && (uintptr_t)params[i] % 64) return INVALID_VALUE;
        memcpy(at, params[i], function->sizes[i]);
        at += (function->sizes[i] + 15) & ~15u;
    }
    put(stream, op);
    return OK;
}

int NAME(cuLaunchKernel, hipModuleLaunchKernel)(function_t *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                                                uint32_t bz, uint32_t shared, stream_t *stream, void **params, void **extra) {
    (void)extra;
    ENTER("launch");
    status = launch(function, (uint32_t[]){gx, gy, gz}, (uint32_t[]){bx, by, bz}, shared, stream, params, 0, 0);
    LEAVE;
}

#ifndef FAKE_HIP
typedef struct { uint32_t id, pad; union { uint32_t words[16]; } value; } attribute_t;
typedef struct { uint32_t grid[3], block[3], shared; stream_t *stream; attribute_t *attributes; uint32_t count; } config_t;

int cuLaunchKernelEx(const config_t *config, function_t *function, void **params, void **extra) {
    (void)extra;
    ENTER("launch_ex");
    uint32_t cluster = 0, overlaps = 0;
    for (uint32_t i = 0; i < config->count; i++) {
        if (config->attributes[i].id == 4) cluster = config->attributes[i].value.words[0];
        if (config->attributes[i].id == 6) overlaps = config->attributes[i].value.words[0];
    }
    status = launch(function, config->grid, config->block, config->shared, config->stream, params, cluster, overlaps);
    LEAVE;
}

typedef struct { uint32_t magic, kind, rank, swizzle; uint64_t address, dims[5]; uint32_t box[5], promotion; } map_t;

int cuTensorMapEncodeTiled(map_t *map, int kind, uint32_t rank, address_t address, const uint64_t *dims, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion, int fill) {
    (void)strides, (void)element_strides, (void)interleave, (void)fill;
    ENTER("tensor_map");
    if ((uintptr_t)map % 64 || address % 16) status = INVALID_VALUE;
    else {
        *map = (map_t){.magic = 0x7A5E, .kind = (uint32_t)kind, .rank = rank, .swizzle = (uint32_t)swizzle, .address = address,
                       .promotion = (uint32_t)promotion};
        memcpy(map->dims, dims, rank * sizeof *dims);
        memcpy(map->box, box, rank * sizeof *box);
    }
    LEAVE;
}
#endif

/* Graphs. A capture takes what is put into the stream. */
int NAME(cuStreamBeginCapture_v2, hipStreamBeginCapture)(stream_t *stream, int mode) {
    (void)mode;
    ENTER("begin_capture");
    if (stream->first) status = CAPTURE_UNSUPPORTED;
    else stream->capture = stream;
    LEAVE;
}

int NAME(cuStreamEndCapture, hipStreamEndCapture)(stream_t *stream, op_t **graph) {
    ENTER("end_capture");
    *graph = calloc(1, sizeof **graph); /* a head before the first op */
    (*graph)->next = stream->first;
    (*graph)->lane = stream;
    for (op_t *op = stream->first; op; op = op->next) {
        if (op->lane == stream) continue;
        op->lane->capture = NULL;
        int joined = 0; /* everything in another stream comes before a record that the first one waits for */
        for (op_t *later = op, *record = NULL; later; later = later->next) {
            if (later->lane == op->lane && later->kind == RECORD) record = later;
            if (later->lane == stream && later->kind == WAIT && record && later->event == record->event) joined = 1;
        }
        if (!joined) status = CAPTURE_UNJOINED;
    }
    stream->first = NULL;
    stream->last = &stream->first;
    stream->capture = NULL;
    LEAVE;
}

static void free_list(op_t *op) {
    while (op) {
        op_t *next = op->next;
        free_op(op);
        op = next;
    }
}

#ifdef FAKE_HIP
int hipGraphInstantiateWithFlags(op_t **executable, op_t *graph, unsigned long long flags) {
#else
int cuGraphInstantiateWithFlags(op_t **executable, op_t *graph, unsigned long long flags) {
#endif
    (void)flags;
    ENTER("graph_instantiate");
    op_t **at = executable;
    for (op_t *op = graph; op; op = op->next) {
        *at = malloc(sizeof *op);
        **at = op == graph ? *op : copy_of(op);
        (*at)->next = NULL;
        at = &(*at)->next;
    }
    LEAVE;
}

int NAME(cuGraphDestroy, hipGraphDestroy)(op_t *graph) {
    ENTER("graph_destroy");
    free_list(graph);
    LEAVE;
}

int NAME(cuGraphExecDestroy, hipGraphExecDestroy)(op_t *executable) {
    ENTER("executable_destroy");
    free_list(executable);
    LEAVE;
}

int NAME(cuGraphLaunch, hipGraphLaunch)(op_t *executable, stream_t *stream) {
    ENTER("graph_launch");
    /* Streams other than the first become new ones; events are recorded and waited for as they were when captured. */
    stream_t *from[8] = {executable->lane}, *to[8] = {stream};
    for (op_t *op = executable->next; op; op = op->next) {
        int lane = 0;
        while (lane < 8 && from[lane] && from[lane] != op->lane) lane++;
        if (lane == 8) abort();
        if (!from[lane]) {
            from[lane] = op->lane;
            to[lane] = calloc(1, sizeof **to);
            to[lane]->last = &to[lane]->first;
        }
        op_t copy = copy_of(op);
        if (op->kind == RECORD) {
            copy.event->stream = to[lane];
            copy.generation = ++copy.event->recorded;
        }
        if (op->kind == WAIT) {
            copy.waited = copy.event->stream;
            copy.generation = copy.event->recorded;
        }
        put(to[lane], copy);
    }
    LEAVE;
}

/* Virtual memory: PROT_NONE until it is mapped and made accessible. */
int NAME(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity)(size_t *size, const void *properties, int option) {
    (void)properties, (void)option;
    ENTER("vmm_granularity");
    *size = GRANULARITY;
    LEAVE;
}

int NAME(cuMemAddressReserve, hipMemAddressReserve)(address_t *address, size_t nbytes, size_t align, address_t hint, unsigned long long flags) {
    (void)align, (void)hint, (void)flags;
    ENTER("vmm_reserve");
    void *memory = nbytes % GRANULARITY ? MAP_FAILED : mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) status = INVALID_VALUE;
    else {
        add_range((uintptr_t)memory, nbytes, RESERVED);
        *address = (uintptr_t)memory | DEVICE_BIT;
    }
    LEAVE;
}

int NAME(cuMemAddressFree, hipMemAddressFree)(address_t address, size_t nbytes) {
    ENTER("vmm_unreserve");
    if (drop_range(address & ~DEVICE_BIT, RESERVED) != nbytes) status = INVALID_VALUE;
    else munmap((void *)(uintptr_t)(address & ~DEVICE_BIT), nbytes);
    LEAVE;
}

int NAME(cuMemCreate, hipMemCreate)(uint64_t *handle, size_t nbytes, const void *properties, unsigned long long flags) {
    (void)properties, (void)flags;
    ENTER("vmm_create");
    if (nbytes % GRANULARITY) status = INVALID_VALUE;
    else if (memory_used + nbytes > memory_limit) status = OUT_OF_MEMORY;
    else {
        size_t *size = malloc(sizeof *size);
        *size = nbytes;
        memory_used += nbytes;
        *handle = (uintptr_t)size;
    }
    LEAVE;
}

int NAME(cuMemRelease, hipMemRelease)(uint64_t handle) {
    ENTER("vmm_release");
    memory_used -= *(size_t *)(uintptr_t)handle;
    free((void *)(uintptr_t)handle);
    LEAVE;
}

int NAME(cuMemMap, hipMemMap)(address_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)offset, (void)flags;
    ENTER("vmm_map");
    if (*(size_t *)(uintptr_t)handle != nbytes || !find(address & ~DEVICE_BIT, nbytes, RESERVED)) status = INVALID_VALUE;
    LEAVE;
}

int NAME(cuMemSetAccess, hipMemSetAccess)(address_t address, size_t nbytes, const void *description, size_t count) {
    (void)description, (void)count;
    ENTER("vmm_set_access");
    mprotect((void *)(uintptr_t)(address & ~DEVICE_BIT), nbytes, PROT_READ | PROT_WRITE);
    memset((void *)(uintptr_t)(address & ~DEVICE_BIT), 0xCD, nbytes);
    add_range(address & ~DEVICE_BIT, nbytes, MAPPED);
    LEAVE;
}

int NAME(cuMemUnmap, hipMemUnmap)(address_t address, size_t nbytes) {
    ENTER("vmm_unmap");
    if (drop_range(address & ~DEVICE_BIT, MAPPED) != nbytes) status = INVALID_VALUE;
    LEAVE;
}

/* ---- kernels ---- */

#define SIZES(name, ...) const uint32_t name##_sizes[] = {__VA_ARGS__, 0}
#define ARG(type, i) (*(type *)params[i])
#define KERNEL(name) void name(void **params, const uint32_t *grid, uint32_t threads)

/* out[i] = x[i] * factor + add for i < rows * width; the grid has a block a row */
SIZES(scale_rows, 8, 8, 4, 4, 4);
KERNEL(scale_rows) {
    (void)threads;
    int32_t width = ARG(int32_t, 2);
    size_t count = (size_t)grid[0] * (size_t)width;
    const float *x = device_bytes(ARG(address_t, 0), count * 4);
    float *out = device_bytes(ARG(address_t, 1), count * 4);
    if (x == (void *)nowhere || out == (void *)nowhere) return;
    for (size_t i = 0; i < count; i++) out[i] = x[i] * ARG(float, 3) + ARG(float, 4);
}

/* out[0] = out[0] * 2 + value: the order of launches shows */
SIZES(append, 8, 8);
KERNEL(append) {
    (void)grid, (void)threads;
    int64_t *out = device_bytes(ARG(address_t, 0), 8);
    *out = *out * 2 + ARG(int64_t, 1);
}

/* out = rank, swizzle, dims[0..1], box[0..1], kind, address low bit pattern of the tensor map */
SIZES(describe_map, 128, 8);
KERNEL(describe_map) {
    (void)grid, (void)threads;
    const uint32_t *words = params[0];
    int64_t *out = device_bytes(ARG(address_t, 1), 64);
    const uint64_t *dims = (const uint64_t *)(words + 6);
    const uint32_t *box = words + 16;
    if (words[0] != 0x7A5E) return;
    out[0] = words[2], out[1] = words[3], out[2] = (int64_t)dims[0], out[3] = (int64_t)dims[1], out[4] = box[0], out[5] = box[1];
    out[6] = words[1], out[7] = 1;
}

/* out[i] = src[i] + 1, bytes */
SIZES(next_bytes, 8, 8, 8);
KERNEL(next_bytes) {
    (void)grid, (void)threads;
    size_t count = (size_t)ARG(int64_t, 2);
    const unsigned char *src = device_bytes(ARG(address_t, 0), count);
    unsigned char *out = device_bytes(ARG(address_t, 1), count);
    if (src == (void *)nowhere || out == (void *)nowhere) return;
    for (size_t i = 0; i < count; i++) out[i] = (unsigned char)(src[i] + 1);
}

/* writes past its buffer when told to */
SIZES(poke, 8, 8);
KERNEL(poke) {
    (void)grid, (void)threads;
    *(char *)device_bytes(ARG(address_t, 0) + ARG(uint64_t, 1), 1) = 1;
}
