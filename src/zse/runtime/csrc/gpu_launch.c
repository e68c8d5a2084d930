/* Walks a launch list into a stream: one call from Python for a step of hundreds of kernels. */
#include "zse_gpu.h"


#define MAX_GRID_X 0x7fffffffll
#define MAX_GRID_YZ 65535ll
/* CUlaunchAttributeID */
#define ATTRIBUTE_CLUSTER_DIMENSION 4
#define ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION 6
#define NOT_READY 600 /* the same in CUDA and HIP */

struct zse_gpu_list {
    zse_gpu_launch *launches;
    uint64_t *args;
    void **params; /* params[i]: where the bytes of argument slot i are */
    zse_patch *patches;
    int64_t *symbol_max;
    int64_t num_launches, num_patches, num_symbols;
};

void zse_gpu_list_destroy(zse_gpu_list *list) {
    free(list->launches);
    free(list->args);
    free(list->params);
    free(list->patches);
    free(list->symbol_max);
    free(list);
}

zse_gpu_list *zse_gpu_list_create(const zse_gpu_launch *launches, int64_t num_launches, const uint64_t *args, int64_t num_args,
                                  const zse_patch *patches, int64_t num_patches, const int64_t *symbol_max, int64_t num_symbols,
                                  int32_t *error) {
    *error = ZSE_EINVAL;
    if (num_launches < 0 || num_args < 0 || num_patches < 0 || num_symbols < 0) return NULL;
    *error = ZSE_ENOMEM;
    zse_gpu_list *list = calloc(1, sizeof *list);
    if (!list) return NULL;
    list->launches = zse_copied(launches, num_launches, sizeof *launches);
    list->args = zse_copied(args, num_args, sizeof *args);
    list->params = calloc(num_args ? (size_t)num_args : 1, sizeof *list->params);
    list->patches = zse_copied(patches, num_patches, sizeof *patches);
    list->symbol_max = zse_copied(symbol_max, num_symbols, sizeof *symbol_max);
    if (!list->launches || !list->args || !list->params || !list->patches || !list->symbol_max) goto fail;
    list->num_launches = num_launches;
    list->num_patches = num_patches;
    list->num_symbols = num_symbols;
    *error = ZSE_EINVAL;
    for (int64_t i = 0; i < num_launches; i++) {
        const zse_gpu_launch *launch = &list->launches[i];
        static const uint32_t slots[] = {0, 3, 3, 5, 1, 2}; /* of each kind but kernels */
        if (launch->kind > ZSE_GPU_HOST || launch->num_args > ZSE_MAX_ARGS) goto fail;
        if (launch->first_arg > num_args || launch->num_args > num_args - launch->first_arg) goto fail;
        if (launch->kind == ZSE_GPU_KERNEL ? !launch->function || !launch->threads : launch->num_args != slots[launch->kind]) goto fail;
        for (uint32_t j = 0; j < launch->num_args; j++) {
            uint64_t *slot = &list->args[launch->first_arg + j];
            list->params[launch->first_arg + j] = launch->wide >> j & 1 ? (void *)(uintptr_t)*slot : (void *)slot;
        }
    }
    if (!zse_patches_fit(patches, num_patches, num_launches, num_args, num_symbols)) goto fail;
    *error = ZSE_OK;
    return list;
fail:
    zse_gpu_list_destroy(list);
    return NULL;
}

static int32_t launch_kernel(const zse_gpu_driver *driver, const zse_gpu_launch *launch, void **params, void *stream,
                             int overlaps) {
    if (!driver->launch_ex)
        return driver->launch(launch->function, (uint32_t)launch->grid[0], (uint32_t)launch->grid[1], (uint32_t)launch->grid[2],
                              launch->threads, 1, 1, launch->shared_bytes, stream, params, NULL);
    zse_gpu_attribute attributes[2];
    uint32_t count = 0;
    if (overlaps)
        attributes[count++] = (zse_gpu_attribute){.id = ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.flag = 1};
    if (launch->cluster > 1)
        attributes[count++] = (zse_gpu_attribute){.id = ATTRIBUTE_CLUSTER_DIMENSION, .value.cluster = {launch->cluster, 1, 1}};
    zse_gpu_config config = {
        .grid = {(uint32_t)launch->grid[0], (uint32_t)launch->grid[1], (uint32_t)launch->grid[2]},
        .block = {launch->threads, 1, 1},
        .shared_bytes = launch->shared_bytes,
        .stream = stream,
        .attributes = attributes,
        .num_attributes = count,
    };
    return driver->launch_ex(&config, launch->function, params, NULL);
}

/* Writes this replay's numbers. The driver copies arguments at launch, so the next replay may write them again. */
static int32_t prepare(zse_gpu_list *list, const int64_t *symbols, int64_t *where) {
    if ((*where = zse_bad_symbol(symbols, list->symbol_max, list->num_symbols)) >= 0) return ZSE_ERANGE;
    for (int64_t i = 0; i < list->num_patches; i++) {
        const zse_patch *patch = &list->patches[i];
        int64_t value = zse_patch_value(patch, symbols);
        if (!patch->is_grid) {
            list->args[patch->target] = (uint64_t)value;
            continue;
        }
        if (value < 0 || value > (patch->target % 3 ? MAX_GRID_YZ : MAX_GRID_X)) return ZSE_ERANGE;
        list->launches[patch->target / 3].grid[patch->target % 3] = value;
    }
    return ZSE_OK;
}

/* The copy's stream waits for what `stream` was given so far: what reads the destination has been submitted before. */
static int32_t fetch(const zse_gpu_driver *driver, const uint64_t *args, void *stream, void *copies) {
    void *free_event = (void *)(uintptr_t)args[3], *ready = (void *)(uintptr_t)args[4];
    int32_t status = driver->event_record(free_event, stream);
    if (!status) status = driver->stream_wait_event(copies, free_event, 0);
    if (!status) status = driver->to_device(args[0], (const void *)(uintptr_t)args[1], args[2], copies);
    return status ? status : driver->event_record(ready, copies);
}

int32_t zse_gpu_list_submit(const zse_gpu_driver *driver, zse_gpu_list *list, void *stream, void *copies, const int64_t *symbols,
                            void *executable, void *event, void *const *marks, int64_t *where) {
    int32_t status = prepare(list, symbols, where);
    if (status) return status;
    *where = list->num_launches;
    if ((status = driver->set_current(driver->current))) return status;
    if (executable) {
        if ((status = driver->graph_launch(executable, stream))) return status;
        return event ? driver->event_record(event, stream) : 0;
    }
    for (int64_t i = 0; i < list->num_launches; i++) {
        const zse_gpu_launch *launch = &list->launches[i];
        const uint64_t *args = list->args + launch->first_arg;
        *where = i;
        if (marks && (status = driver->event_record(marks[i], stream))) return status;
        if (launch->kind == ZSE_GPU_UPLOAD)
            status = args[2] ? driver->to_device(args[0], (const void *)(uintptr_t)args[1], args[2], stream) : 0;
        else if (launch->kind == ZSE_GPU_DOWNLOAD)
            status = args[2] ? driver->to_host((void *)(uintptr_t)args[1], args[0], args[2], stream) : 0;
        else if (launch->kind == ZSE_GPU_FETCH)
            status = fetch(driver, args, stream, copies);
        else if (launch->kind == ZSE_GPU_AWAIT)
            status = driver->stream_wait_event(stream, (void *)(uintptr_t)args[0], 0);
        else if (launch->kind == ZSE_GPU_HOST)
            status = driver->launch_host(stream, (void (*)(void *))(uintptr_t)args[0], (void *)(uintptr_t)args[1]);
        else if (launch->grid[0] && launch->grid[1] && launch->grid[2]) /* a driver refuses an empty grid */
            status = launch_kernel(driver, launch, list->params + launch->first_arg, stream, launch->overlaps && !marks);
        if (status) return status;
        if (driver->stream_wait && (status = driver->stream_wait(stream))) return status;
    }
    *where = list->num_launches;
    if (marks && (status = driver->event_record(marks[list->num_launches], stream))) return status;
    return event ? driver->event_record(event, stream) : 0;
}

int32_t zse_gpu_wait(const zse_gpu_driver *driver, void *event, int64_t spin_us) {
    int32_t status = driver->set_current(driver->current);
    if (status) return status;
    if (spin_us > 0) {
        int64_t end = zse_now_us() + spin_us;
        do {
            status = driver->event_query(event);
            if (status != NOT_READY) return status;
        } while (zse_now_us() < end);
    }
    return driver->event_wait(event);
}
