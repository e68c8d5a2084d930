typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
struct alignas(64) tensormap { u64 opaque[16]; };

struct alignas(4) bf16x2 { u32 w[1]; };

static __device__ __forceinline__ u32 zse_shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
static __device__ __forceinline__ bf16x2 zse_load_bf16x2(const void *p) { bf16x2 r; const u32 t0 = ((const u32 *)p)[0]; r.w[0] = t0; return r; }
static __device__ __forceinline__ u32 zse_bits_bf16x2_u32(bf16x2 a) { u32 r; r = (u32)a.w[0]; return r; }
static __device__ __forceinline__ void zse_mma_bf16(f32 &c0, f32 &c1, f32 &c2, f32 &c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// gpu_kernels.py: warp_tile(K=64, T=bf16)
extern "C" __global__ void __launch_bounds__(32, 1) warp_tile_bf16(const bf16 *a, const bf16 *b, f32 *out) {
  extern __shared__ __align__(1024) unsigned char zse_shared[];
  bf16 *tile = (bf16 *)(zse_shared + 0);  // 
  f32 acc = 0.0f;  // 
  f32 acc_1 = 0.0f;
  f32 acc_2 = 0.0f;
  f32 acc_3 = 0.0f;
  i32 lane = (i32)(threadIdx.x & 31);  // 
  for (i32 i = (lane * 8); i < 1024; i += 256) {  // 
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(zse_shared_address((tile + i))), "l"((a + i)) : "memory");  // 
  }
  asm volatile("cp.async.commit_group;" ::: "memory");  // 
  asm volatile("cp.async.wait_group 0;" ::: "memory");  // 
  __syncwarp();  // 
  u32 ldmatrix; u32 ldmatrix_1; u32 ldmatrix_2; u32 ldmatrix_3;  // 
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(ldmatrix), "=r"(ldmatrix_1), "=r"(ldmatrix_2), "=r"(ldmatrix_3) : "r"(zse_shared_address((tile + (((lane % 16) * 64) + ((lane / 16) * 8))))) : "memory");
  const bf16 *row = ((b + ((lane / 4) * 64)) + ((lane % 4) * 2));  // 
  u32 fb = zse_bits_bf16x2_u32(zse_load_bf16x2(row));  // 
  u32 fb_1 = zse_bits_bf16x2_u32(zse_load_bf16x2((row + 8ll)));
  zse_mma_bf16(acc, acc_1, acc_2, acc_3, ldmatrix, ldmatrix_1, ldmatrix_2, ldmatrix_3, fb, fb_1);  // 
  u32 ldmatrix_4; u32 ldmatrix_5; u32 ldmatrix_6; u32 ldmatrix_7;  // 
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(ldmatrix_4), "=r"(ldmatrix_5), "=r"(ldmatrix_6), "=r"(ldmatrix_7) : "r"(zse_shared_address(((tile + (((lane % 16) * 64) + ((lane / 16) * 8))) + 16ll))) : "memory");
  row = (((b + ((lane / 4) * 64)) + 16ll) + ((lane % 4) * 2));  // 
  u32 fb_2 = zse_bits_bf16x2_u32(zse_load_bf16x2(row));  // 
  u32 fb_3 = zse_bits_bf16x2_u32(zse_load_bf16x2((row + 8ll)));
  zse_mma_bf16(acc, acc_1, acc_2, acc_3, ldmatrix_4, ldmatrix_5, ldmatrix_6, ldmatrix_7, fb_2, fb_3);  // 
  u32 ldmatrix_8; u32 ldmatrix_9; u32 ldmatrix_10; u32 ldmatrix_11;  // 
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(ldmatrix_8), "=r"(ldmatrix_9), "=r"(ldmatrix_10), "=r"(ldmatrix_11) : "r"(zse_shared_address(((tile + (((lane % 16) * 64) + ((lane / 16) * 8))) + 32ll))) : "memory");
  row = (((b + ((lane / 4) * 64)) + 32ll) + ((lane % 4) * 2));  // 
  u32 fb_4 = zse_bits_bf16x2_u32(zse_load_bf16x2(row));  // 
  u32 fb_5 = zse_bits_bf16x2_u32(zse_load_bf16x2((row + 8ll)));
  zse_mma_bf16(acc, acc_1, acc_2, acc_3, ldmatrix_8, ldmatrix_9, ldmatrix_10, ldmatrix_11, fb_4, fb_5);  // 
  u32 ldmatrix_12; u32 ldmatrix_13; u32 ldmatrix_14; u32 ldmatrix_15;  // 
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(ldmatrix_12), "=r"(ldmatrix_13), "=r"(ldmatrix_14), "=r"(ldmatrix_15) : "r"(zse_shared_address(((tile + (((lane % 16) * 64) + ((lane / 16) * 8))) + 48ll))) : "memory");
  row = (((b + ((lane / 4) * 64)) + 48ll) + ((lane % 4) * 2));  // 
  u32 fb_6 = zse_bits_bf16x2_u32(zse_load_bf16x2(row));  // 
  u32 fb_7 = zse_bits_bf16x2_u32(zse_load_bf16x2((row + 8ll)));
  zse_mma_bf16(acc, acc_1, acc_2, acc_3, ldmatrix_12, ldmatrix_13, ldmatrix_14, ldmatrix_15, fb_6, fb_7);  // 
  *(out + (((((lane / 4) + 0) * 8) + ((lane % 4) * 2)) + 0)) = acc;  // 
  *(out + (((((lane / 4) + 0) * 8) + ((lane % 4) * 2)) + 1)) = acc_1;
  *(out + (((((lane / 4) + 8) * 8) + ((lane % 4) * 2)) + 0)) = acc_2;
  *(out + (((((lane / 4) + 8) * 8) + ((lane % 4) * 2)) + 1)) = acc_3;
}
