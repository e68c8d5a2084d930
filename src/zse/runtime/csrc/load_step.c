/* Weight loader, for a GPU: kernels that make weights of what was copied, in the stream of the copies. */
#define _GNU_SOURCE
#include "load.h"

static int32_t launch(zse_load *load, const zse_gpu_launch *launch) {
    void *params[ZSE_MAX_ARGS];
    for (uint32_t i = 0; i < launch->num_args; i++) params[i] = load->args + launch->first_arg + i;
    return load->driver.launch(launch->function, (uint32_t)launch->grid[0], (uint32_t)launch->grid[1], (uint32_t)launch->grid[2],
                               launch->threads, 1, 1, launch->shared_bytes, load->options.stream, params, NULL);
}

int32_t load_copy(zse_load *load, int64_t job, uint64_t device, const void *host, int64_t nbytes) {
    zse_load_step *step = load->jobs[job].step < 0 ? NULL : &load->steps[load->jobs[job].step];
    if (step) {
        pthread_mutex_lock(&load->lock);
        while (load->num_launched < step->after && !atomic_load(&load->cancelled)) pthread_cond_wait(&load->stepped, &load->lock);
        int given_up = load->num_launched < step->after;
        pthread_mutex_unlock(&load->lock);
        if (given_up) return -1;
    }
    int32_t status = load->driver.to_device(device, host, (size_t)nbytes, load->options.stream);
    if (!step || status) return status;
    /* Under the lock: whoever brings the last bytes launches after all copies of the step were put into the stream. */
    pthread_mutex_lock(&load->lock);
    step->nbytes -= nbytes;
    if (!step->nbytes) status = launch(load, &step->launch);
    if (!status)
        while (load->num_launched < load->num_steps && !load->steps[load->num_launched].nbytes) load->num_launched++;
    pthread_cond_broadcast(&load->stepped);
    pthread_mutex_unlock(&load->lock);
    return status;
}
