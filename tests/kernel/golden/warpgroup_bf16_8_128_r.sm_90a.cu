typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
struct alignas(64) tensormap { u64 opaque[16]; };

struct alignas(16) bf16x8 { u32 w[4]; };
struct alignas(4) bf16x2 { u32 w[1]; };

static __device__ __forceinline__ bf16x8 zse_load_bf16x8(const void *p) { bf16x8 r; const uint4 t0 = ((const uint4 *)p)[0]; r.w[0] = t0.x; r.w[1] = t0.y; r.w[2] = t0.z; r.w[3] = t0.w; return r; }
static __device__ __forceinline__ void zse_store_bf16x8(void *p, bf16x8 a) { uint4 t0; t0.x = a.w[0]; t0.y = a.w[1]; t0.z = a.w[2]; t0.w = a.w[3]; ((uint4 *)p)[0] = t0; }
static __device__ __forceinline__ u32 zse_shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
static __device__ __forceinline__ bf16x2 zse_load_bf16x2(const void *p) { bf16x2 r; const u32 t0 = ((const u32 *)p)[0]; r.w[0] = t0; return r; }
static __device__ __forceinline__ u32 zse_bits_bf16x2_u32(bf16x2 a) { u32 r; r = (u32)a.w[0]; return r; }

// gpu_kernels.py: warpgroup_tile(N=8, K=64, SWIZZLE=128, REGISTERS=True, T=bf16)
extern "C" __global__ void __launch_bounds__(128, 1) warpgroup_bf16_8_128_r(const bf16 *a, const bf16 *b, f32 *out) {
  extern __shared__ __align__(1024) unsigned char zse_shared[];
  bf16 *sa = (bf16 *)(zse_shared + 0);  // 
  bf16 *sb = (bf16 *)(zse_shared + 8192);  // 
  i32 t = (i32)threadIdx.x;  // 
  for (i32 i = t; i < 512; i += 128) {  // 
    i32 value = (i / 8);  // 
    i32 value_1 = (i % 8);
    i32 row = value;
    i32 chunk = value_1;
    i32 offset = (((row * 8) + chunk) * 16);  // 
    zse_store_bf16x8((sa + (((offset ^ (((offset >> 7) & 7) << 4)) / 16) * 8)), zse_load_bf16x8(((a + (row * 64)) + (chunk * 8))));  // 
  }
  for (i32 i_1 = t; i_1 < 64; i_1 += 128) {  // 
    i32 value_2 = (i_1 / 8);  // 
    i32 value_3 = (i_1 % 8);
    i32 row_1 = value_2;
    i32 chunk_1 = value_3;
    i32 offset_1 = (((row_1 * 8) + chunk_1) * 16);  // 
    zse_store_bf16x8((sb + (((offset_1 ^ (((offset_1 >> 7) & 7) << 4)) / 16) * 8)), zse_load_bf16x8(((b + (row_1 * 64)) + (chunk_1 * 8))));  // 
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // 
  __syncthreads();  // 
  f32 acc = 1.0f;  // 
  f32 acc_1 = 1.0f;
  f32 acc_2 = 1.0f;
  f32 acc_3 = 1.0f;
  i32 lane = (i32)(threadIdx.x & 31);  // 
  asm volatile("wgmma.fence.sync.aligned;" : "+f"(acc), "+f"(acc_1), "+f"(acc_2), "+f"(acc_3) :: "memory");  // 
  u64 desc_b = (0x4000004000010000ull | (u64)((zse_shared_address(sb) & 0x3ffff) >> 4));  // 
  const bf16 *here = ((a + ((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) * 64)) + ((lane % 4) * 2));  // 
  u32 operand = zse_bits_bf16x2_u32(zse_load_bf16x2(here));  // 
  u32 operand_1 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 512ll)));
  u32 operand_2 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 8ll)));
  u32 operand_3 = zse_bits_bf16x2_u32(zse_load_bf16x2(((here + 512ll) + 8ll)));
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"  // 
    : "+f"(acc), "+f"(acc_1), "+f"(acc_2), "+f"(acc_3)
    : "r"(operand), "r"(operand_1), "r"(operand_2), "r"(operand_3), "l"(desc_b), "r"((i32)false));
  desc_b = (0x4000004000010000ull | (u64)((zse_shared_address((sb + 16ll)) & 0x3ffff) >> 4));  // 
  here = (((a + ((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) * 64)) + 16ll) + ((lane % 4) * 2));  // 
  u32 operand_4 = zse_bits_bf16x2_u32(zse_load_bf16x2(here));  // 
  u32 operand_5 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 512ll)));
  u32 operand_6 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 8ll)));
  u32 operand_7 = zse_bits_bf16x2_u32(zse_load_bf16x2(((here + 512ll) + 8ll)));
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"  // 
    : "+f"(acc), "+f"(acc_1), "+f"(acc_2), "+f"(acc_3)
    : "r"(operand_4), "r"(operand_5), "r"(operand_6), "r"(operand_7), "l"(desc_b), "r"((i32)true));
  desc_b = (0x4000004000010000ull | (u64)((zse_shared_address((sb + 32ll)) & 0x3ffff) >> 4));  // 
  here = (((a + ((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) * 64)) + 32ll) + ((lane % 4) * 2));  // 
  u32 operand_8 = zse_bits_bf16x2_u32(zse_load_bf16x2(here));  // 
  u32 operand_9 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 512ll)));
  u32 operand_10 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 8ll)));
  u32 operand_11 = zse_bits_bf16x2_u32(zse_load_bf16x2(((here + 512ll) + 8ll)));
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"  // 
    : "+f"(acc), "+f"(acc_1), "+f"(acc_2), "+f"(acc_3)
    : "r"(operand_8), "r"(operand_9), "r"(operand_10), "r"(operand_11), "l"(desc_b), "r"((i32)true));
  desc_b = (0x4000004000010000ull | (u64)((zse_shared_address((sb + 48ll)) & 0x3ffff) >> 4));  // 
  here = (((a + ((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) * 64)) + 48ll) + ((lane % 4) * 2));  // 
  u32 operand_12 = zse_bits_bf16x2_u32(zse_load_bf16x2(here));  // 
  u32 operand_13 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 512ll)));
  u32 operand_14 = zse_bits_bf16x2_u32(zse_load_bf16x2((here + 8ll)));
  u32 operand_15 = zse_bits_bf16x2_u32(zse_load_bf16x2(((here + 512ll) + 8ll)));
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"  // 
    : "+f"(acc), "+f"(acc_1), "+f"(acc_2), "+f"(acc_3)
    : "r"(operand_12), "r"(operand_13), "r"(operand_14), "r"(operand_15), "l"(desc_b), "r"((i32)true));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");  // 
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(acc), "+f"(acc_1), "+f"(acc_2), "+f"(acc_3) :: "memory");  // 
  *(out + ((((((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) + 0) * 8) + 0) + ((lane % 4) * 2)) + 0)) = acc;  // 
  *(out + ((((((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) + 0) * 8) + 0) + ((lane % 4) * 2)) + 1)) = acc_1;
  *(out + ((((((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) + 8) * 8) + 0) + ((lane % 4) * 2)) + 0)) = acc_2;
  *(out + ((((((((i32)(threadIdx.x >> 5) * 16) + (lane / 4)) + 8) * 8) + 0) + ((lane % 4) * 2)) + 1)) = acc_3;
}
