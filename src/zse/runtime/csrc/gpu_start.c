/* Opens a CUDA context on a thread of its own, from the first moment of a process: cuInit and the context are 0.15 s or more, in
 * which Python imports. A Python thread would have to wait for the interpreter's lock after every call (5 ms each time).
 *
 * Nothing is checked here: the caller makes the same calls again, which are quick then, and says what is wrong.
 */
#include "zse_gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

struct zse_gpu_opening {
    pthread_t thread;
    _Atomic int32_t done;
    int32_t ordinal, device, retained;
    char path[];
};

static void open_context(zse_gpu_opening *opening) {
    void *library = dlopen(opening->path, RTLD_NOW | RTLD_LOCAL), *context = NULL;
    if (!library) return;
    int32_t (*init)(uint32_t) = (int32_t (*)(uint32_t))dlsym(library, "cuInit");
    int32_t (*get)(int32_t *, int32_t) = (int32_t (*)(int32_t *, int32_t))dlsym(library, "cuDeviceGet");
    int32_t (*retain)(void **, int32_t) = (int32_t (*)(void **, int32_t))dlsym(library, "cuDevicePrimaryCtxRetain");
    if (!init || !get || !retain || init(0) || get(&opening->device, opening->ordinal)) return;
    opening->retained = retain(&context, opening->device) == 0;
    /* The library stays open: the caller opens it too. */
}

static void *opening_main(void *argument) {
    zse_gpu_opening *opening = argument;
    open_context(opening);
    atomic_store(&opening->done, 1);
    return NULL;
}

zse_gpu_opening *zse_gpu_open_start(const char *path, int32_t ordinal) {
    zse_gpu_opening *opening = calloc(1, sizeof *opening + strlen(path) + 1);
    if (!opening) return NULL;
    opening->ordinal = ordinal;
    strcpy(opening->path, path);
    if (pthread_create(&opening->thread, NULL, opening_main, opening)) {
        free(opening);
        return NULL;
    }
    return opening;
}

int32_t zse_gpu_open_done(const zse_gpu_opening *opening) {
    return atomic_load(&((zse_gpu_opening *)(uintptr_t)opening)->done);
}

int32_t zse_gpu_open_wait(zse_gpu_opening *opening) {
    pthread_join(opening->thread, NULL);
    int32_t retained = opening->retained;
    free(opening);
    return retained;
}
