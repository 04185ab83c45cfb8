# FLATOUT_CUDA=EMULATED: g++ compiles the kernels, for the emulated devices of tests/emulated_cuda.
file(GLOB emulated_kernels CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/csrc/*/*.cu ${PROJECT_SOURCE_DIR}/tests/emulated_cuda/harness/*.cu)
add_subdirectory(tests/emulated_cuda)
set_source_files_properties(${emulated_kernels}
  DIRECTORY ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/tests/emulated_cuda
  PROPERTIES LANGUAGE CXX
  INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/tests/emulated_cuda/kernels
  COMPILE_OPTIONS "-include;device_code.h;-O1;-g1")
set(FLATOUT_BUILD_CUDA ON)
set(FLATOUT_CUDART emulated_cudart)
