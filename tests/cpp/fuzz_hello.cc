// libFuzzer target; built by .ci/fuzz.sh with clang.
#include "decoders.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pycomm::test::feed_hello(data, size);
  return 0;
}
