// Functions that also run on a GPU: the specification of a format is one source for every processor.
#pragma once

#ifdef __CUDACC__
#define KVANTA_HD __host__ __device__
#else
#define KVANTA_HD
#endif
