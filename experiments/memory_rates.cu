// Rates of device memory, beside which passes can be put: writes, reads and copies of 268 MB.
//
//     nvcc -arch=sm_90a -O3 -o memory_rates experiments/memory_rates.cu && ./memory_rates
//
// Medians of 20 runs by CUDA events. Four buffers take turns, so that the cache holds nothing of the next one. A block
// of 256 threads takes 16 KB, 16 bytes a thread at a time.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <vector>

constexpr size_t kBytes = size_t(1) << 28, kChunk = 16384;
constexpr int kBuffers = 4, kThreads = 256, kAtOnce = 4;
constexpr int kBlocks = kBytes / kChunk;

__global__ void fill(char* to, uint32_t x) {
  const uint4 value = {x, x + threadIdx.x, x, x + blockIdx.x};
  for (size_t i = threadIdx.x * 16; i < kChunk; i += kThreads * 16) *(uint4*)(to + blockIdx.x * kChunk + i) = value;
}

__global__ void copy(const char* from, char* to) {
  const size_t first = blockIdx.x * kChunk + threadIdx.x * 16, step = kThreads * 16;
  uint4 values[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) values[j] = *(const uint4*)(from + first + j * step);
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) *(uint4*)(to + first + j * step) = values[j];
}

__global__ void read(const char* from, uint32_t* out) {
  const size_t first = blockIdx.x * kChunk + threadIdx.x * 16, step = kThreads * 16;
  uint4 values[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) values[j] = *(const uint4*)(from + first + j * step);
  uint32_t sum = 0;
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) sum += values[j].x ^ values[j].y ^ values[j].z ^ values[j].w;
  if (sum == 12345) *out = sum;  // so that the loads are not left out
}

template <class Run>
void report(const char* name, double bytes, Run run) {
  cudaEvent_t start, end;
  cudaEventCreate(&start), cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 24; i++) {
    cudaEventRecord(start);
    run(i % kBuffers);
    cudaEventRecord(end), cudaEventSynchronize(end);
    float ms;
    cudaEventElapsedTime(&ms, start, end);
    if (i >= 4) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const float ms = times[times.size() / 2];
  printf("%-12s %.4f ms %6.0f GB/s\n", name, ms, bytes / ms / 1e6);
}

int main() {
  char* buffers[kBuffers];
  uint32_t* out;
  cudaMalloc(&out, 4);
  for (auto& buffer : buffers) cudaMalloc(&buffer, kBytes), cudaMemset(buffer, 1, kBytes);
  auto other = [&](int i) { return buffers[(i + 2) % kBuffers]; };
  report("cudaMemset", kBytes, [&](int i) { cudaMemsetAsync(buffers[i], i, kBytes); });
  report("fill", kBytes, [&](int i) { fill<<<kBlocks, kThreads>>>(buffers[i], i); });
  report("read", kBytes, [&](int i) { read<<<kBlocks, kThreads>>>(buffers[i], out); });
  report("copy", 2.0 * kBytes, [&](int i) { copy<<<kBlocks, kThreads>>>(buffers[i], other(i)); });
  report("cudaMemcpy", 2.0 * kBytes,
         [&](int i) { cudaMemcpyAsync(other(i), buffers[i], kBytes, cudaMemcpyDeviceToDevice); });
  cudaDeviceSynchronize();
  puts(cudaGetErrorString(cudaGetLastError()));
}
