// attn_cuda is the GPU engine: the launch of attn.h on a CUDA device.  No CUDA type appears here; a
// stream is passed as void * (a cudaStream_t, or a CUstream of the primary context).
//
// A launch goes in three steps, so that the middle ones cost nothing in a captured graph:
//     attn_cuda_plan_set     host only: checks the rows, cuts them, writes the plan
//     attn_cuda_plan_upload  copies the plan to the device, in the stream
//     attn_cuda_launch       the kernels that the plan needs, each one constant grid, in the stream
// A graph that captured attn_cuda_launch replays with whatever plan was uploaded last: other rows,
// other lengths, other tables, the same shape, and no other kernels than the plan needed that was
// set when it was captured (attn_cuda_plan_kernels).  attn_cuda_run does all three.
//
// Which memory: `params`, `params.rows` and each `attn_rope` and `attn_block_mask` lie in host
// memory and are read by attn_cuda_plan_set alone.  All arrays that a row points to (q, out, lse,
// k_new, v_new, table, sinks, alibi_slopes, inv_freq, positions, masks) and the pool are device
// memory, read by the kernel.  So the host cannot look into tables and masks here: whoever takes
// them from a client checks a copy first (attn_check with host copies of the arrays).
//
// What the kernel wants, refused by name otherwise (ATTND_ENOTSUP):
//     head_dim = v_head_dim = 64 or 128; q_dtype = kv_dtype = BF16 or F16
//     block_tokens a multiple of 16; head-major blocks: stride_k_token = stride_v_token = head_dim
//     pool, block_stride, k_offset, v_offset and head strides aligned to 16 bytes; q, k_new, v_new
//     and out and their strides too
//     no k_scale, v_scale; where there is a prefill kernel, no forced splits with a block mask, or
//     a tree mask of more than 32 tokens
//
// Two kernels share out the rows of a launch:
//     decode   cuts the keys of a row over the SMs (append and RoPE in the same kernel).  Query
//              rows (tokens * q_heads / kv_heads) are taken in records of up to 64, each of which
//              reads the keys that it sees.  Rows of few tokens, and all rows with num_splits.
//     prefill  cuts the query rows, for rows of many tokens, and all rows with a block mask or a
//              tree mask of more than 32 tokens.  sm_90a only: on other GPUs decode takes all
//              rows, those masks included.  A small kernel before it appends and rotates.  Keys
//              of a row are added up in one order, so its bits depend on nothing else.
//
// A row must not attend to tokens that another row of the same launch appends.
//
// On sm_90 a launch may begin before the kernel in front of it in the stream has ended
// (programmatic dependent launch).  Until that one has ended, it reads the plan and the block
// tables alone: write these by copies or by earlier kernels, not by the very kernel in front (but
// see attn_cuda_plan_work).
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_H

#include "attention/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_cuda attn_cuda;           // the struct is in attn_cuda.c
typedef struct attn_cuda_plan attn_cuda_plan; // likewise

typedef struct attn_cuda_opts {
    int32_t device;           // CUDA ordinal
    uint64_t workspace_bytes; // device memory for states of split rows; 0 = 64 MiB
    const char *kernel;       // "bulk" (sm_90 up), "portable" (sm_80 up); NULL = the best there is
    int32_t min_part_tiles;   // a row is not cut into parts of fewer tiles of 16 keys; 0 = default
    // Rows of that many query rows a KV head (q_len * q_heads / kv_heads) are prefilled; 0 = as
    // measured (attn_prefill.h), -1 = none are.
    int32_t prefill_rows;
} attn_cuda_opts;

// attn_cuda_create makes an engine on a device, in its primary context.  opts may be NULL.
// ATTND_ENOTSUP when the device or the kernel asked for is not there, ATTND_ENOMEM, ATTND_ECUDA.
// The caller owns *out: attn_cuda_free.
attnd_err attn_cuda_create(attn_cuda **out, const attn_cuda_opts *opts, attnd_errinfo *info);

// attn_cuda_free waits for nothing: the launches must have ended, the plans be freed.  Accepts
// NULL.
void attn_cuda_free(attn_cuda *cuda);

// attn_cuda_plan_create makes room for plans of up to max_records records over one shape: pinned
// host memory and device memory of some 600 bytes a record.  A row needs one record; a row that is
// decoded, one more for each further 64 of its query rows (q_count * q_heads / kv_heads), counted
// in each query block of a block mask by itself.  ATTND_EINVAL and ATTND_ENOTSUP with the field of
// a shape that is wrong or not supported, ATTND_ENOMEM, ATTND_ECUDA.  The caller owns *out:
// attn_cuda_plan_free, before attn_cuda_free.
attnd_err attn_cuda_plan_create(attn_cuda_plan **out, attn_cuda *cuda, const attn_shape *shape,
                                uint32_t max_records, attnd_errinfo *info);

// attn_cuda_plan_create_at is the same in memory of the caller's, which outlives the plan:
// attn_cuda_plan_room bytes of pinned host memory and of device memory, aligned to 256.  It neither
// allocates on the device nor waits for it, so a stream may be under capture meanwhile.  Until the
// first upload nothing may be launched.  attn_cuda_plan_room returns 0 for a shape without a
// kernel.
uint64_t attn_cuda_plan_room(const attn_cuda *cuda, const attn_shape *shape, uint32_t max_records);
attnd_err attn_cuda_plan_create_at(attn_cuda_plan **out, attn_cuda *cuda, const attn_shape *shape,
                                   uint32_t max_records, void *host, void *device,
                                   attnd_errinfo *info);

// attn_cuda_plan_move_host makes the plan be written to other pinned memory from the next
// attn_cuda_plan_set on, so that one can be made while another is uploaded.
void attn_cuda_plan_move_host(attn_cuda_plan *plan, void *host);

// attn_cuda_plan_used returns how many bytes from the plan's start on say all of it, 0 when that is
// more than one run of bytes: whoever has several plans side by side can copy them at once.
uint64_t attn_cuda_plan_used(const attn_cuda_plan *plan);

// attn_cuda_plan_free accepts NULL.  The launches that use the plan must have ended.
void attn_cuda_plan_free(attn_cuda_plan *plan);

// attn_cuda_plan_set checks and plans a launch.  It touches host memory only and does not allocate;
// an upload of the plan must have ended.  *choice (may be NULL) says what will run.  ATTND_EINVAL
// or ATTND_ENOTSUP with the field; ATTND_EMSGSIZE when the rows need more than max_records records
// or (deterministic, forced splits; RoPE's angles of rows that are prefilled: 4 * rotary_dim bytes
// a token) more than workspace_bytes.  A refused plan leaves the plan empty.
attnd_err attn_cuda_plan_set(attn_cuda_plan *plan, const attn_params *p, attn_choice *choice,
                             attnd_errinfo *info);

// attn_cuda_plan_upload copies the plan to the device in stream order.  ATTND_ECUDA.
attnd_err attn_cuda_plan_upload(attn_cuda_plan *plan, void *stream, attnd_errinfo *info);

// attn_cuda_plan_kernels returns which kernels the plan needs that was set last, as a set of bits.
enum {
    ATTN_CUDA_DECODE = 1 << 0, // also when there are no rows
    ATTN_CUDA_PREPARE = 1 << 1,
    ATTN_CUDA_PREFILL = 1 << 2,
    ATTN_CUDA_PORTABLE = 1 << 3, // decode by the portable kernel, whatever the engine's own
};
uint32_t attn_cuda_plan_kernels(const attn_cuda_plan *plan);

// attn_cuda_plan_work returns where on the device the plan says how much there is to do: a kernel
// right in front of the launch that stores 0 there, fences, and does not let the launch begin
// before its own end, has that do nothing, and later ones, until the plan is uploaded again.  NULL:
// there is no such place, the plan needs more than the decode kernel.
uint32_t *attn_cuda_plan_work(attn_cuda_plan *plan);

// attn_cuda_launch starts the kernels in stream order.  Launches of one engine share its workspace:
// they must follow each other, in one stream or by events.  ATTND_ECUDA with the code in detail
// when the launch is refused; an error of the kernel itself shows at the next synchronisation.
attnd_err attn_cuda_launch(attn_cuda_plan *plan, void *stream, attnd_errinfo *info);

// attn_cuda_shift is how many bytes behind those of the plan's rows a launch's tensors lie: layers
// that differ in nothing else can share a plan.
typedef struct attn_cuda_shift {
    int64_t q, out, lse, k_new, v_new;
    int64_t k, v; // k_offset and v_offset
} attn_cuda_shift;

// attn_cuda_launch_shifted is attn_cuda_launch with other tensors.  ATTND_ENOTSUP when the plan
// needs more than ATTN_CUDA_DECODE.
attnd_err attn_cuda_launch_shifted(attn_cuda_plan *plan, const attn_cuda_shift *shift, void *stream,
                                   attnd_errinfo *info);

// attn_cuda_run is set, upload and launch.
attnd_err attn_cuda_run(attn_cuda_plan *plan, const attn_params *p, void *stream,
                        attn_choice *choice, attnd_errinfo *info);

// attn_cuda_prefills is true when there is a prefill kernel.
bool attn_cuda_prefills(const attn_cuda *cuda);

// attn_cuda_masks is what computes rows of a shape with a block mask, or with a tree mask of more
// than 32 tokens: what there is on this GPU in this build, which may have but some of the kernels.
typedef enum attn_cuda_masks {
    ATTN_CUDA_MASKS_NONE,    // nothing: they are refused
    ATTN_CUDA_MASKS_PREFILL, // prefill, without forced splits
    ATTN_CUDA_MASKS_DECODE,  // decode, by the portable kernel
} attn_cuda_masks;
attn_cuda_masks attn_cuda_takes_masks(const attn_cuda *cuda, const attn_shape *shape);

// attn_cuda_kernel returns the name of the kernel that the engine takes: "bulk" or "portable".
const char *attn_cuda_kernel(const attn_cuda *cuda);

#ifdef __cplusplus
}
#endif

#endif
