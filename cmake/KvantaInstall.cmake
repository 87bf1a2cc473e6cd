# cmake --install: public headers, one static library, and the files of find_package(kvanta). JSON and text formatting are
# compiled in, so a program that links kvanta::kvanta needs only threads, hiredis, OpenSSL and, where it was
# found, Gloo.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(KVANTA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kvanta)
install(TARGETS kvanta EXPORT kvantaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY include/kvanta DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)
install(EXPORT kvantaTargets NAMESPACE kvanta:: DESTINATION ${KVANTA_PACKAGE_DIR} COMPONENT development)

configure_package_config_file(cmake/kvantaConfig.cmake.in ${PROJECT_BINARY_DIR}/kvantaConfig.cmake
                              INSTALL_DESTINATION ${KVANTA_PACKAGE_DIR})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvantaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvantaConfig.cmake ${PROJECT_BINARY_DIR}/kvantaConfigVersion.cmake
        DESTINATION ${KVANTA_PACKAGE_DIR} COMPONENT development)
