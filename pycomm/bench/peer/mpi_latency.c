/* An all_reduce of two pinned ranks called from C, timed as the core's own: the median of means of
   100 operations and the 99th percentile of single ones, in seconds, as JSON from rank 0. */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { kBatch = 100, kBatches = 300, kWarm = 30, kSingles = 20000 };

static void pin(int index) {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  pin(rank);
  const int count = atoi(argv[1]) / (int)sizeof(float);
  float* data = calloc((size_t)count, sizeof(float));
  static double means[kBatches], singles[kSingles];
  for (int b = 0; b < kBatches; ++b) {
    const double start = MPI_Wtime();
    for (int i = 0; i < kBatch; ++i) {
      MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
    means[b] = (MPI_Wtime() - start) / kBatch;
  }
  for (int i = 0; i < kSingles; ++i) {
    const double start = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    singles[i] = MPI_Wtime() - start;
  }
  qsort(means + kWarm, kBatches - kWarm, sizeof(double), compare);
  qsort(singles, kSingles, sizeof(double), compare);
  if (rank == 0) {
    printf("{\"p50_s\": %.9g, \"p99_s\": %.9g}\n", means[kWarm + (kBatches - kWarm) / 2],
           singles[kSingles * 99 / 100]);
  }
  MPI_Finalize();
  return 0;
}
