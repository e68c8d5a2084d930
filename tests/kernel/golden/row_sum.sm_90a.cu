typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
struct alignas(64) tensormap { u64 opaque[16]; };

struct alignas(16) f32x8 { f32 v[8]; };
struct alignas(16) bf16x8 { u32 w[4]; };

static __device__ __forceinline__ bf16x8 zse_load_bf16x8(const void *p) { bf16x8 r; const uint4 t0 = ((const uint4 *)p)[0]; r.w[0] = t0.x; r.w[1] = t0.y; r.w[2] = t0.z; r.w[3] = t0.w; return r; }
static __device__ __forceinline__ f32x8 zse_f32_of_bf16x8(bf16x8 a) { f32x8 r; r.v[0] = __uint_as_float(a.w[0] << 16); r.v[1] = __uint_as_float(a.w[0] & 0xffff0000u); r.v[2] = __uint_as_float(a.w[1] << 16); r.v[3] = __uint_as_float(a.w[1] & 0xffff0000u); r.v[4] = __uint_as_float(a.w[2] << 16); r.v[5] = __uint_as_float(a.w[2] & 0xffff0000u); r.v[6] = __uint_as_float(a.w[3] << 16); r.v[7] = __uint_as_float(a.w[3] & 0xffff0000u); return r; }

// gpu_kernels.py: row_sum()
extern "C" __global__ void __launch_bounds__(256, 1) row_sum(const bf16 *x, f32 *out, i32 width) {
  extern __shared__ __align__(1024) unsigned char zse_shared[];
  f32 *partial = (f32 *)(zse_shared + 0);  // 
  const bf16 *row = (x + ((i32)blockIdx.x * width));  // 
  f32 total = 0.0f;  // 
  #pragma unroll 4  // 
  for (i32 i = ((i32)threadIdx.x * 8); i < width; i += 2048) {
    f32x8 v = zse_f32_of_bf16x8(zse_load_bf16x8((row + i)));  // 
    total = (total + v.v[0]);  // 
    total = (total + v.v[1]);
    total = (total + v.v[2]);
    total = (total + v.v[3]);
    total = (total + v.v[4]);
    total = (total + v.v[5]);
    total = (total + v.v[6]);
    total = (total + v.v[7]);
  }
  f32 value = total;  // warplib.py:
  f32 value_1 = __shfl_xor_sync(0xffffffffu, value, 16);  // warplib.py:
  value = (value + value_1);
  f32 value_2 = __shfl_xor_sync(0xffffffffu, value, 8);
  value = (value + value_2);
  f32 value_3 = __shfl_xor_sync(0xffffffffu, value, 4);
  value = (value + value_3);
  f32 value_4 = __shfl_xor_sync(0xffffffffu, value, 2);
  value = (value + value_4);
  f32 value_5 = __shfl_xor_sync(0xffffffffu, value, 1);
  value = (value + value_5);
  total = value;  // 
  if (((i32)(threadIdx.x & 31) == 0)) {  // 
    *(partial + (i32)(threadIdx.x >> 5)) = total;  // 
  }
  __syncthreads();  // 
  if (((i32)(threadIdx.x >> 5) == 0)) {  // 
    f32 value_6 = 0.0f;  // 
    if (((i32)(threadIdx.x & 31) < 8)) {  // 
      value_6 = (*(partial + (i32)(threadIdx.x & 31)));  // 
    }
    f32 value_7 = value_6;  // warplib.py:
    f32 value_8 = __shfl_xor_sync(0xffffffffu, value_7, 16);  // warplib.py:
    value_7 = (value_7 + value_8);
    f32 value_9 = __shfl_xor_sync(0xffffffffu, value_7, 8);
    value_7 = (value_7 + value_9);
    f32 value_10 = __shfl_xor_sync(0xffffffffu, value_7, 4);
    value_7 = (value_7 + value_10);
    f32 value_11 = __shfl_xor_sync(0xffffffffu, value_7, 2);
    value_7 = (value_7 + value_11);
    f32 value_12 = __shfl_xor_sync(0xffffffffu, value_7, 1);
    value_7 = (value_7 + value_12);
    value_6 = value_7;  // 
    if (((i32)(threadIdx.x & 31) == 0)) {  // 
      *(out + (i32)blockIdx.x) = value_6;  // 
    }
  }
}
